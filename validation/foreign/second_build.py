"""The reference built a second time: whether it is the same every time."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import nn

from reference.data import Batch
from validation.foreign.task import Task
from validation.judging.judge import one_thread
from validation.judging.tolerance import FP32, scalar_error
from validation.observers.sketch import contents


class Twin:
    """A second model of ``task``, beside one with the contents ``known``; an iterable of one step, which builds it."""

    def __init__(self, task: Task, device: str, known: Mapping[str, bytes]) -> None:
        self._task, self._device, self._known = task, device, known

    def __iter__(self) -> Iterator[str]:
        yield self.other_weights

    @cached_property
    def model(self) -> nn.Module:
        """It, with the weights that a step begins with."""
        return self._task.built(self._device)

    @cached_property
    def other_weights(self) -> str:
        """The first parameter in which the two differ, in words; empty if none does."""
        own = contents(self.model)
        name = next((name for name in {**self._known, **own} if self._known.get(name) != own.get(name)), "")
        seed = "seed it, e.g. torch.manual_seed(0) inside"
        return name and f"called twice it gave other weights, first {name}: {seed}"

    def mode_matters(self, known: Sequence[float], batches: Sequence[Batch]) -> bool:
        """Whether any loss would be another in evaluation mode, or may be."""
        loss = self._task.loss
        try:
            with one_thread(), torch.no_grad():
                self.model.eval()
                return list(known) != [loss.function(self.model(*b.inputs), b.target).item() for b in batches]
        except Exception:  # no one type: it is the user's code that runs
            return True
        finally:
            self.model.train()

    def other_loss(self, known: float, batch: Batch) -> str:
        """How the loss of microbatch 0 differs between the two, in words; empty if it does not."""
        loss = self._task.loss
        with one_thread():
            own = loss.function(self.model(*batch.inputs), batch.target).item()
        if own == known or scalar_error(known, own) <= FP32.least or (own != own and known != known):
            return ""
        return (
            f"two forwards of microbatch 0 from equal weights gave losses {known:.6g} and {own:.6g}: draw from a "
            "generator that is seeded by layer and microbatch, or switch dropout off"
        )
