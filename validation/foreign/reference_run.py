"""What is to be validated, as the user gave it, and the reference's own run over its microbatches."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeproof.diagnosis.members import Replicas
from pipeproof.foreign.boundary_places import Cuts
from pipeproof.foreign.rank import Step
from pipeproof.foreign.survey import Both, Survey
from pipeproof.judging.judge import one_thread
from pipeproof.judging.tolerance import FP32, scalar_error
from pipeproof.judging.verdict import Crash, raised
from pipeproof.observers.sketch import contents
from pipeproof.pipeline.sizes import some
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.reference.data import Batch
from pipeproof.reference.graph import ends_of, uses
from pipeproof.reference.step import Contribution, Gradient, Loss, LossError, Recipe, Reference, Site
from pipeproof.worlds.accelerator import first_of


class WhiteBoxError(ValueError):
    """A validation that cannot be: what was asked for makes no sense."""


class ReferenceRaised(Exception):
    """The reference, which is the user's own code, cannot be run. Its cause is what it raised."""


@dataclass(frozen=True)
class Task:
    """What is to be validated, as the user gave it."""

    step: Step
    reference: Callable[[], nn.Module]
    microbatches: tuple[Any, ...]
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None
    loss_divisor: float | None = None
    optimizer: Callable[[nn.Module], Optimizer] | None = None

    def check(self) -> None:
        """Raise ``WhiteBoxError`` for what cannot be."""
        if not callable(self.step):
            raise WhiteBoxError(f"step is {self.step!r}: expected a function step(model, microbatches)")
        check_builds("reference", self.reference)
        if self.loss_fn is not None:
            check_loss_fn(self.loss_fn)
        if not self.microbatches:
            raise WhiteBoxError("microbatches is empty: expected at least one")
        check_divisor(self.loss_divisor)
        if self.optimizer is not None and not callable(self.optimizer):
            raise WhiteBoxError(
                f"optimizer is {type(self.optimizer).__name__}: expected a function that makes one of the model"
            )
        for number in range(len(self.microbatches)):
            self._batch(number)

    def updated(
        self, reference: Reference, gradients: Mapping[Site, Gradient], *, max_norm: float | None
    ) -> dict[Site, Tensor]:
        """What the optimizer, if there is one, makes of the parameters with these gradients, clipped to ``max_norm``.

        Raises ``ReferenceRaised``.
        """
        if self.optimizer is None:
            return {}
        try:
            return reference.updated(gradients, self.optimizer, max_norm=max_norm)
        except Exception as error:  # no one type: it is the user's code
            raise ReferenceRaised(f"optimizer={name_of(self.optimizer)} raised {raised(error)}") from error

    @property
    def name(self) -> str:
        return name_of(self.reference)

    @property
    def loss(self) -> Loss:
        """The loss of a microbatch, and what it is divided by."""
        function = self.loss_fn or (lambda output, target: output)
        return Loss(function, float(self.loss_divisor or len(self.microbatches)))

    @property
    def hint(self) -> str:
        """What a reference that cannot be run may lack."""
        called = "it was called with all of a microbatch, inputs and target, and has to give the loss"
        return "" if self.loss_fn else f"; no loss_fn was given, so {called}: give loss_fn=, if it gives the output"

    def title(self, ranks: int) -> str:
        """The subject in words."""
        count = some(len(self.microbatches), "microbatch")
        return f"{name_of(self.step)} on {some(ranks, 'rank')}, {count}, reference {self.name}"

    def built(self, device: str) -> nn.Module:
        """The reference, as every rank builds it."""
        try:
            model = self.reference()
        except Exception as error:  # no one type: it is the user's code
            raise ReferenceRaised(f"the reference {self.name} cannot be built: it raised {raised(error)}") from error
        check_module(f"reference {self.name} returned", model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise WhiteBoxError(f"reference {self.name} has no parameter to train: nothing could be compared")
        return model.to(first_of(device)).train()

    def batches(self, model: nn.Module) -> list[Batch]:
        """The microbatches for the reference, where ``model`` is."""
        device = str(next(model.parameters()).device)
        return [self._batch(number).to(device) for number in range(len(self.microbatches))]

    def repeated(self, device: str) -> frozenset[str]:
        """The parameters that the reference uses in several places, by all their names, as its first microbatch shows.

        Such a one may have a copy in every stage that uses it. What cannot be told is in none.
        """
        model = self.built(device)
        return repeated(model, self.batches(model)[0], self.loss.function)

    def _batch(self, number: int) -> Batch:
        given = self.microbatches[number]
        batch = Batch.of(given, torch.empty(0)) if self.loss_fn is None else Batch.of(*pair_of(number, given))
        for tensor in (*batch.inputs, batch.target):
            if not isinstance(tensor, Tensor):
                raise WhiteBoxError(f"microbatch {number} has a {type(tensor).__name__} in it: expected tensors only")
        return batch


def check_builds(what: str, given: Any, error: type[WhiteBoxError] = WhiteBoxError) -> None:
    """Raise ``error`` where what is ``given`` as ``what`` is no function that builds a model."""
    if isinstance(given, nn.Module) or not callable(given):
        raise error(f"{what} is a {type(given).__name__}: expected a function that builds it")


def check_module(what: str, given: Any, error: type[WhiteBoxError] = WhiteBoxError) -> None:
    """Raise ``error`` where what is ``given``, ``what`` says by whom, is no model."""
    if not isinstance(given, nn.Module):
        raise error(f"{what} a {type(given).__name__}: expected a torch.nn.Module")


def check_loss_fn(given: Any) -> None:
    """Raise ``WhiteBoxError`` where it is no function."""
    if not callable(given):
        raise WhiteBoxError(f"loss_fn is {given!r}: expected a function of output and target")


def check_divisor(given: Any) -> None:
    """Raise ``WhiteBoxError`` where losses cannot be divided by it; None: by their number."""
    if given is not None and (not isinstance(given, int | float) or not given > 0):
        raise WhiteBoxError(f"loss_divisor is {given!r}: expected a number above 0")


def pair_of(number: int, given: Any) -> tuple[Any, Any]:
    """Inputs and target of the microbatch of this number. Raises ``WhiteBoxError``."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        many = f" of {len(given)}" if isinstance(given, tuple | list) else ""
        raise WhiteBoxError(
            f"microbatch {number} is a {type(given).__name__}{many}: expected a pair of inputs and target"
        )
    inputs, target = given
    return inputs, target


def repeated(model: nn.Module, batch: Batch, loss_fn: Callable[[Any, Tensor], Tensor]) -> frozenset[str]:
    """The parameters that ``model``, which is used up by it, uses in several places for ``batch``, by all names."""
    model.requires_grad_()
    inputs = [one.detach().requires_grad_() * 1 if one.is_floating_point() else one for one in batch.inputs]
    try:
        loss = loss_fn(model(*inputs), batch.target)
    except RuntimeError:  # of the user's own code, which may not like that its data has a gradient
        return frozenset()
    count, parameters = uses(ends_of([loss])), model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, one in parameters if count[id(one)] > 1)


def name_of(function: object) -> str:
    """What to call ``function``."""
    function = getattr(function, "func", function)  # of a functools.partial
    return str(getattr(function, "__name__", None) or type(function).__name__)


class SecondModel:
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
        self._task, self._model, self._replicas = task, model, replicas
        self._late = late
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._survey = Survey(model, replicas=replicas.count) if surveyed else None
        each = {name: number for number, name in enumerate(self._parameters)}
        self._coming = self.reference(each if owner is None else owner).contributing(self.batches)
        self._made: list[Contribution] = []
        self._failure: Exception | None = None
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
            return self
        model = self._built() if begun else self._model
        return ReferenceRun(self._task, model, self._replicas, owner=owner, surveyed=watched)

    def divided_late(self, owner: Mapping[str, int], *, watched: bool, late: float) -> "ReferenceRun":
        """Another run in these stages, from the same weights, that leaves so much of the divisor to gradients."""
        return ReferenceRun(self._task, self._built(), self._replicas, owner=owner, surveyed=watched, late=late)

    def _built(self) -> nn.Module:
        return self._task.built(next(self._model.parameters()).device.type)

    def reference(
        self, owner: Mapping[str, int], copies: Collection[Site] = (), *, accumulation: Accumulation = PLAIN
    ) -> Reference:
        """The reference in these stages, which adds gradients up in this way."""
        recipe = Recipe(loss=self._task.loss, late=self._late, accumulation=accumulation)
        return Reference(self._model, owner=owner, recipe=recipe, copies=copies, by_use=True)

    def made(self, owner: Mapping[str, int]) -> tuple[Contribution, ...]:
        """What every microbatch gives in these stages. Raises ``ReferenceRaised``."""
        deque(self, maxlen=0)
        failure = self._failure
        if failure is not None:
            known = isinstance(failure, LossError)
            why = f"cannot be differentiated: {failure}" if known else f"raised {raised(failure)}"
            where = f"on microbatch {len(self._made)} the reference {self._task.name}"
            raise ReferenceRaised(f"{where} {why}{self._task.hint}") from failure
        return tuple(one.under(owner) for one in self._made)

    @property
    def places(self) -> Both | None:
        """Where what passed, if the run was surveyed."""
        return None if self._survey is None else self._survey.places

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

    def _next(self) -> Contribution:
        number = len(self._made)
        if self._survey is None:
            return next(self._coming)
        return self._survey.watch(number, self.batches[number], lambda: next(self._coming))
