"""The reference's own run over the microbatches of a task."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from pipeproof.core.judge import one_thread
from pipeproof.core.limits import FP32
from pipeproof.core.observe.shards import held_here
from pipeproof.core.replicas import Replicas
from pipeproof.core.tolerance import same_bits, scalar_error
from pipeproof.core.verdict import Crash, raised
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.reference.data import Batch
from pipeproof.reference.otherwise import types_in
from pipeproof.reference.step import Contribution, Loss, LossError, Recipe, Reference, Site
from pipeproof.whitebox.boundary_places import Cuts
from pipeproof.whitebox.survey import Both, Survey
from pipeproof.whitebox.task import ReferenceRaised, Task

_NARROW = frozenset({torch.bfloat16, torch.float16})


def computed_in(model: nn.Module, batches: Sequence[Batch], loss: Loss) -> torch.dtype | None:
    """The narrowest type that ``model`` computes in, by autocast or by hand; None where it is not narrow."""
    owner = {name: 0 for name, _ in model.named_parameters(remove_duplicate=False)}
    reference = Reference(model, owner=owner, recipe=Recipe(loss=loss))
    try:
        with one_thread():
            types = types_in(lambda: reference.contribute(batches))
    except Exception:  # no one type: it is the user's code, which may not run so
        return None
    return max(types & _NARROW, key=lambda one: torch.finfo(one).eps, default=None)


class SecondModel:
    """A second model of ``task``, beside its ``first``; an iterable of one step, which builds it."""

    def __init__(self, task: Task, device: str, first: nn.Module) -> None:
        self._task, self._device, self._first = task, device, first

    def __iter__(self) -> Iterator[str]:
        yield self.other_weights

    @cached_property
    def model(self) -> nn.Module:
        """It, with the weights that a step begins with."""
        return self._task.built(self._device)

    def like(self, task: Task) -> nn.Module:
        """One of ``task``, with the weights that it begins with."""
        return self.model if task is self._task else task.built(self._device)

    @cached_property
    def other_weights(self) -> str:
        """The first parameter in which the two differ, in words; empty if none does."""
        models = self._first, self.model
        known, own = ({n: held_here(p) for n, p in one.named_parameters(remove_duplicate=False)} for one in models)
        alike = {name for name in known.keys() & own.keys() if same_bits(known[name], own[name])}
        name = next((name for name in {**known, **own} if name not in alike), "")
        seed = "seed it, e.g. torch.manual_seed(0) inside"
        return name and f"called twice it gave other weights, first {name}: {seed}"

    def mode_matters(self, known: Sequence[float], batches: Sequence[Batch]) -> bool:
        """Whether any loss would be another in the other mode, or may be."""
        loss = self._task.loss
        try:
            with one_thread(), torch.no_grad():
                self.model.train(self._task.evaluates)
                return list(known) != [loss.function(b.through(self.model), b.target).item() for b in batches]
        except Exception:  # no one type: it is the user's code that runs
            return True
        finally:
            self.model.train(not self._task.evaluates)

    def other_loss(self, known: float, batch: Batch) -> str:
        """How the loss of microbatch 0 differs between the two, in words; empty if it does not."""
        loss = self._task.loss
        with one_thread():
            own = loss.function(batch.through(self.model), batch.target).item()
        if own == known or scalar_error(known, own) <= FP32.least or (own != own and known != known):
            return ""
        return (
            f"two forwards of microbatch 0 from equal weights gave losses {known:.6g} and {own:.6g}: draw from a "
            "generator that is seeded by layer and microbatch, or switch dropout off"
        )


class ReferenceRun:
    """An iterator of which each step makes what ``model`` gives for one more microbatch of ``task``.

    ``owner`` is the stage of every parameter name. While the ranks have yet to tell it, each name is a stage of its own
    (None), and the run is surveyed in case they watch. late: this part of the divisor is left to gradients, once they
    are added up; where losses are scaled, it is more.
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
        self._survey = Survey(model, replicas=replicas.count, again=self._survey_again) if surveyed else None
        self._own = self.reference({name: k for k, name in enumerate(self._parameters)} if owner is None else owner)
        self._coming = self._own.contributing(self.batches)
        self._made: list[Contribution] = []
        self._failure: Exception | None = None
        self._left: dict[str, Tensor] = {}
        self.crash: Crash | None = None  # of ours, where places were noted for a diagnosis

    def __iter__(self) -> "ReferenceRun":
        return self

    def __next__(self) -> None:
        """Make the next microbatch's. What that raises is kept: where the ranks fail too, they are heard first."""
        if self._failure is not None or len(self._made) == len(self.batches):
            raise StopIteration
        try:
            with one_thread():
                self._made.append(self._next())
        except Exception as failure:  # no one type: it is the user's code that runs
            self._failure = failure

    def settled(self, owner: Mapping[str, int], *, watched: bool) -> "ReferenceRun":
        """This run, where it has begun and holds for these owners; else another that does, from the same weights.

        It does not hold where two names of one tensor share a stage: autograd sums what they give in its own order.
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
        """Another run in these stages, from the same weights; ``task``: as this run's, with other routes."""
        task = task or self._task
        return ReferenceRun(task, task.built(self.device), self._replicas, owner=owner, surveyed=watched, late=late)

    @property
    def device(self) -> str:
        """Where it runs."""
        return next(self.model.parameters()).device.type

    def _built(self) -> nn.Module:
        return self._task.built(self.device)

    def reference(
        self, owner: Mapping[str, int], copies: Collection[Site] = (), *, accumulation: Accumulation = PLAIN
    ) -> Reference:
        """The reference in these stages, which adds gradients up in this way."""
        recipe = Recipe(loss=self._task.loss, late=self._late, accumulation=accumulation, outputs=self._task.named)
        return Reference(self.model, owner=owner, recipe=recipe, copies=copies, by_use=True)

    def made(self, owner: Mapping[str, int]) -> tuple[Contribution, ...]:
        """What every microbatch gives in these stages. Raises ``ReferenceRaised``."""
        deque(self, maxlen=0)
        failure = self._failure
        if failure is not None:
            known = isinstance(failure, LossError)
            why = f"cannot be differentiated: {failure}" if known else f"raised {raised(failure)}"
            where = f"on microbatch {len(self._made)} the reference {self._task.name}"
            raise ReferenceRaised(f"{where} {why}{self._task.hint}") from failure
        self._left = self._left or {name: one.detach().cpu().clone() for name, one in self.model.named_buffers()}
        return tuple(one.under(owner) for one in self._made)

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """Those of the model, as the microbatches left them once all were made."""
        return self._left

    @property
    def weights(self) -> dict[str, Tensor]:
        """Those of the model, by all names."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    @property
    def places(self) -> Both | None:
        """Where what passed, if the run was surveyed."""
        return None if self._survey is None else self._survey.places

    def note_types(self) -> None:
        """Note in the places that what passes was computed in a narrower type, if it was: that takes another run."""
        if self._survey is not None and self.computed_in is not None:
            for places in self._survey.places:
                places.computed_in(self.computed_in)

    @cached_property
    def computed_in(self) -> torch.dtype | None:
        """The narrowest type that the model computes in, by autocast or by hand; None where it is not narrow."""
        return computed_in(self._built(), self.batches[:1], self._task.loss)

    def note_handed_on(self, cuts: Cuts) -> None:
        """Note in the places of gradients what each of these stages hands on: that takes another run.

        Some backwards, as of checkpoints, cannot be cut: that is left out. What else is raised is kept as ``crash``.
        """
        if self._survey is None or not cuts:
            return
        try:
            with one_thread():
                model, owner = self._built(), dict.fromkeys(self._parameters, 0)
                reference = Reference(model, owner=owner, recipe=Recipe(loss=self._task.loss, late=self._late))
                self._survey.look_again(model, reference.losses(self.batches), cuts, [one.loss for one in self._made])
        except (RuntimeError, ReferenceRaised):
            return
        except Exception as error:  # no one type: a fault of ours, which no verdict may depend on
            self.crash = Crash.of(error)

    def _survey_again(self) -> None:
        """Look once more where what passes, with all that a diagnosis reads."""
        assert self._survey is not None, "only a survey asks for it"
        model = self._built()
        coming = self._own.of(model).contributing(self.batches)
        with one_thread():
            for number, batch in enumerate(self.batches):
                self._survey.watch(number, batch, lambda: next(coming), other=model)

    def _next(self) -> Contribution:
        number = len(self._made)
        if self._survey is None:
            return next(self._coming)
        return self._survey.watch(number, self.batches[number], lambda: next(self._coming))
