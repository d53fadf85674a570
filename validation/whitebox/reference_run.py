"""The reference's run over a task's microbatches."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from pipeproof.core.judge import one_thread
from pipeproof.core.limits import FP32
from pipeproof.core.observe.shards import local_tensor
from pipeproof.core.replicas import Replicas
from pipeproof.core.tolerance import same_bits, scalar_error
from pipeproof.core.verdict import Crash, describe_error
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.reference.data import Batch
from pipeproof.reference.otherwise import types_in
from pipeproof.reference.step import Contribution, Loss, LossError, Recipe, Reference, Site
from pipeproof.whitebox.boundary_places import Cuts
from pipeproof.whitebox.task import ReferenceRaised, Task
from pipeproof.whitebox.tensor_index import Both, TensorIndex

_NARROW = frozenset({torch.bfloat16, torch.float16})


def narrowest_type(model: nn.Module, batches: Sequence[Batch], loss: Loss) -> torch.dtype | None:
    """Return the narrowest computing type, by autocast or casts. None if not narrow."""
    owner = {name: 0 for name, _ in model.named_parameters(remove_duplicate=False)}
    reference = Reference(model, owner=owner, recipe=Recipe(loss=loss))
    try:
        with one_thread():
            types = types_in(lambda: reference.contribute(batches))
    except Exception:  # any type: user code may fail here
        return None
    return max(types & _NARROW, key=lambda one: torch.finfo(one).eps, default=None)


class SecondModel:
    """A second model for ``task``, beside ``first``; iterating takes one step, which builds it."""

    def __init__(self, task: Task, device: str, first: nn.Module) -> None:
        self._task, self._device, self._first = task, device, first

    def __iter__(self) -> Iterator[str]:
        yield self.other_weights

    @cached_property
    def model(self) -> nn.Module:
        """The model with starting weights."""
        return self._task.build(self._device)

    def like(self, task: Task) -> nn.Module:
        """Return a model for ``task`` with its starting weights."""
        return self.model if task is self._task else task.build(self._device)

    @cached_property
    def other_weights(self) -> str:
        """First parameter that differs between both models, in words; empty if equal."""
        models = self._first, self.model
        known, own = ({n: local_tensor(p) for n, p in one.named_parameters(remove_duplicate=False)} for one in models)
        alike = {name for name in known.keys() & own.keys() if same_bits(known[name], own[name])}
        name = next((name for name in {**known, **own} if name not in alike), "")
        seed = "seed it, e.g. torch.manual_seed(0) inside"
        return name and f"called twice it gave other weights, first {name}: {seed}"

    def mode_matters(self, known: Sequence[float], batches: Sequence[Batch]) -> bool:
        """True if the other mode changes any loss, or fails."""
        try:
            with one_thread(), torch.no_grad():
                self.model.train(self._task.evaluates)
                return list(known) != [self._loss(batch) for batch in batches]
        except Exception:  # any type: user code runs here
            return True
        finally:
            self.model.train(not self._task.evaluates)

    def _loss(self, batch: Batch) -> float:
        return self._task.loss.function(batch.through(self.model), batch.target).item()

    def other_loss(self, known: float, batch: Batch) -> str:
        """Describe how both models' losses on microbatch 0 differ; empty if equal."""
        with one_thread():
            own = self._loss(batch)
        if own == known or scalar_error(known, own) <= FP32.least or (own != own and known != known):
            return ""
        return (
            f"two forwards of microbatch 0 from equal weights gave losses {known:.6g} and {own:.6g}: draw from a "
            "generator that is seeded by layer and microbatch, or switch dropout off"
        )


class ReferenceRun:
    """Iterator that trains ``model`` on one more microbatch of ``task`` per step.

    owner: stage by parameter name. None while ranks still run: each name is its own stage, and a survey runs in case
    they watch. late: part of the divisor applied to summed gradients; larger with a loss scale.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        replicas: Replicas,
        *,
        owner: Mapping[str, int] | None = None,
        surveyed: bool = True,
        late: float = 1.0,
    ) -> None:
        self.batches = task.batches(model)
        self._task, self.model, self._replicas = task, model, replicas
        self._late = late
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._survey = TensorIndex(model, replicas=replicas.count, again=self._survey_again) if surveyed else None
        self._own = self.reference({name: k for k, name in enumerate(self._parameters)} if owner is None else owner)
        self._coming = self._own.contributing(self.batches)
        self._made: list[Contribution] = []
        self._failure: Exception | None = None
        self.buffers: dict[str, Tensor] = {}  # of the model, after all microbatches
        self.crash: Crash | None = None  # our own, while noting places for diagnosis

    def __iter__(self) -> "ReferenceRun":
        return self

    def __next__(self) -> None:
        """Train on the next microbatch. Errors are stored: if ranks fail too, they report first."""
        number = len(self._made)
        if self._failure is not None or number == len(self.batches):
            raise StopIteration
        try:
            with one_thread():
                if self._survey is None:
                    made = next(self._coming)
                else:
                    made = self._survey.watch(number, self.batches[number], lambda: next(self._coming))
            self._made.append(made)
        except Exception as failure:  # any type: user code runs here
            self._failure = failure

    def settle(self, owner: Mapping[str, int], *, watched: bool) -> "ReferenceRun":
        """Return this run if it has begun and suits these owners; otherwise a new one from the same weights.

        It does not suit two names for one tensor in one stage: autograd sums their gradients in its own order.
        """
        begun = bool(self._made or self._failure)
        uses = {(id(parameter), owner[name]) for name, parameter in self._parameters.items()}
        if begun and len(uses) == len(self._parameters):
            self._survey = self._survey if watched else None
            return self
        return self.other(owner, watched=watched)

    def other(
        self, owner: Mapping[str, int], *, watched: bool, late: float = 1.0, task: Task | None = None
    ) -> "ReferenceRun":
        """Return another run with these stages, from the same weights; ``task``: with other routes."""
        task = task or self._task
        return ReferenceRun(task, task.build(self.device), self._replicas, owner=owner, surveyed=watched, late=late)

    @property
    def device(self) -> str:
        """Its device type."""
        return next(self.model.parameters()).device.type

    def reference(
        self, owner: Mapping[str, int], copies: Collection[Site] = (), *, accumulation: Accumulation = PLAIN
    ) -> Reference:
        """Return the reference with these stages and accumulation."""
        recipe = Recipe(loss=self._task.loss, late=self._late, accumulation=accumulation, outputs=self._task.named)
        return Reference(self.model, owner=owner, recipe=recipe, copies=copies, by_use=True)

    def contributions(self, owner: Mapping[str, int]) -> tuple[Contribution, ...]:
        """Return contributions per microbatch in these stages. Raises ``ReferenceRaised``."""
        deque(self, maxlen=0)
        failure = self._failure
        if failure is not None:
            known = isinstance(failure, LossError)
            why = f"cannot be differentiated: {failure}" if known else f"raised {describe_error(failure)}"
            if not self._task.loss_fn:
                called = "it was called with all of a microbatch, inputs and target, and has to give the loss"
                why += f"; no loss_fn was given, so {called}: give loss_fn=, if it gives the output"
            where = f"on microbatch {len(self._made)} the reference {self._task.name}"
            raise ReferenceRaised(f"{where} {why}") from failure
        self.buffers = self.buffers or {name: one.detach().cpu().clone() for name, one in self.model.named_buffers()}
        return tuple(one.under(owner) for one in self._made)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Model weights under all names."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    @property
    def places(self) -> Both | None:
        """Surveyed places, or None."""
        return None if self._survey is None else self._survey.places

    @cached_property
    def computed_in(self) -> torch.dtype | None:
        """Narrowest computing type, by autocast or casts. None if not narrow."""
        return narrowest_type(self._task.build(self.device), self.batches[:1], self._task.loss)

    def note_handed_on(self, cuts: Cuts) -> None:
        """Add each stage's partial gradients to the places: needs another run.

        Some backwards, as with checkpoints, cannot be cut and are skipped. Other errors are stored as ``crash``.
        """
        if self._survey is None or not cuts:
            return
        try:
            with one_thread():
                model, owner = self._task.build(self.device), dict.fromkeys(self._parameters, 0)
                reference = Reference(model, owner=owner, recipe=Recipe(loss=self._task.loss, late=self._late))
                self._survey.look_again(model, reference.losses(self.batches), cuts, [one.loss for one in self._made])
        except (RuntimeError, ReferenceRaised):
            return
        except Exception as error:  # any type: our own fault, which must not affect verdicts
            self.crash = Crash.of(error)

    def _survey_again(self) -> None:
        """Repeat the survey in full, for a diagnosis."""
        assert self._survey is not None, "only a survey asks for it"
        model = self._task.build(self.device)
        coming = self._own.of(model).contributing(self.batches)
        with one_thread():
            for number, batch in enumerate(self.batches):
                self._survey.watch(number, batch, lambda: next(coming), other=model)
