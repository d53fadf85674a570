"""The reference of a step as a player: what a microbatch gives, also where something goes wrong in the model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeproof.core.observe.sketch import Sketch
from pipeproof.reference.copied import copied
from pipeproof.reference.data import Batch
from pipeproof.reference.outputs import Place, module_of, order_of_use, outputs_noted
from pipeproof.reference.step import Contribution, Loss, Reference
from pipeproof.reference.traced import Traced

Planted = Callable[[nn.Module], AbstractContextManager[Any]]  # while it is open, something is otherwise in the model

_NEVER_RAN = (RuntimeError, TypeError, ValueError, IndexError)  # modules that raise these do not take such tensors


@dataclass(frozen=True)
class ModelBeside:
    """A model on one device beside a step, with the weights and the microbatches that the step began with.

    ``traced`` is the model cut into stages. ``lacks``: whether the reference is known to compute no such tensor for a
    microbatch, nor what it is made of.
    """

    reference: Reference
    model: nn.Module
    batches: Sequence[Batch]
    loss: Loss
    traced: Callable[[], Traced]
    lacks: Callable[[int, Sketch], bool] = field(default=lambda microbatch, seen: False)
    _ends: dict[int, Sequence[Place]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def played(self, batch: Batch, planted: Planted = nullcontext) -> Contribution | None:
        """What ``batch`` gives, gradients of tied copies summed; None where the model does not run so."""
        try:
            with planted(self._again.model):
                (made,) = self._again.contributing([batch])
        except _NEVER_RAN:
            return None
        return replace(made, gradients=self._again.total(made.gradients))

    def loss_of(self, batch: Batch, planted: Planted = nullcontext) -> float | None:
        """The loss that ``batch`` gives; None where the model does not run so."""
        try:
            with planted(self._again.model):
                ((loss, _),) = self._again.losses([batch])
        except _NEVER_RAN:
            return None
        return loss.item()

    def loss_with(self, microbatch: int, target: Tensor) -> float | None:
        """The loss of a microbatch with another target; None where it has none such, or does not run with it."""
        own = self.batches[microbatch]
        fits = own.target.numel() and own.target.shape == target.shape
        return self.loss_of(replace(own, target=target)) if fits else None

    def ends(self, stage: int) -> Sequence[Place]:
        """The places where ``stage`` ends, in the order of a module's outputs; none where that is not known."""
        if stage not in self._ends:
            inner = stage < self._traced.stages - 1
            self._ends[stage] = sorted(self._traced.end(stage), key=_in_order) if inner else self.places[-1:]
        return self._ends[stage]

    def later(self, stage: int) -> Collection[str]:
        """The modules that only stages after ``stage`` hold."""
        return self._traced.later(stage)

    @cached_property
    def modules(self) -> Mapping[str, int]:
        """In which order the model's modules end."""
        return order_of_use(copied(self.model), self.batches[0].inputs)

    @cached_property
    def places(self) -> Sequence[Place]:
        """Where its modules put tensors out."""
        model, found = copied(self.model), list[Place]()
        with outputs_noted(model, lambda place, tensor: found.append(place)):
            model(*self.batches[0].inputs)
        return found

    @cached_property
    def plain(self) -> bool:
        """Whether the model gives the same in evaluation, so that it neither draws numbers nor goes by its mode."""
        model, inputs = copied(self.model), self.batches[0].inputs
        with torch.no_grad():
            made = [tree_leaves(mode(*inputs)) for mode in (model.train(), copied(model).eval())]
        pairs = [pair for pair in zip(*made, strict=True) if isinstance(pair[0], Tensor)]
        return all(torch.equal(*pair) for pair in pairs)

    @property
    def draws(self) -> bool:
        """Whether it gives something else in evaluation, other than with statistics of the batch."""
        return not self.plain and not any(True for _ in self.model.buffers())

    @cached_property
    def _traced(self) -> Traced:
        return self.traced()

    @cached_property
    def _again(self) -> Reference:
        return self.reference.of(copied(self.model))


def _in_order(place: Place) -> tuple[str, int]:
    """Outputs of one module in the order of its outputs."""
    return module_of(place), int(place.split()[1])
