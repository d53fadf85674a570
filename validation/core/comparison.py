"""One operation held against what it must give, value by value as they come: the judge of steps, records and jobs.

It asks for one tensor at a time, so a job that holds one stage can be judged where the stage lies.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from pipeproof.core.ledger import Heading, Ledger
from pipeproof.core.limits import precision_of
from pipeproof.core.observe.elements import all_finite, any_nan, any_nonzero
from pipeproof.core.observe.observed import Claim
from pipeproof.core.reason import Reason
from pipeproof.core.tolerance import Floor, may_be_rounded, same_bits, stands_for_none, update_floor
from pipeproof.pipeline.action import Action
from pipeproof.pipeline.sizes import first_few
from pipeproof.reference.step import Expected, Gradient, Site

Follow = Callable[[Mapping[Site, Gradient]], tuple[float, Mapping[Site, Tensor]]]  # of gradients: norm and parameters


@dataclass(frozen=True)
class Due:
    """What an operation must give: tensors by the model's own names, each taken when it is asked for.

    ``microbatches`` are digests of their contents, where anybody took them. ``before`` are the parameters that the
    operation began with, where they are known; ``gradients`` are after tied copies were summed and before clipping,
    ``parameters`` after the optimizer; both are empty where the operation gives none. ``loss`` is what the losses are
    together after division, None where nobody is told.
    """

    operation: str
    microbatches: tuple[str, ...]
    losses: tuple[float, ...]
    loss: float | None = None
    norm: float | None = None
    before: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Tensor | None] = field(default_factory=dict)
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


def due_of(expected: Expected) -> Due:
    """What the reference expects of an operation, by the names of parameters: each name has one site."""
    return Due(
        expected.operation,
        (),
        expected.losses,
        None if expected.operation == "accumulate" else expected.loss,  # what accumulates reports no loss of its own
        expected.norm,
        before=expected.before,
        gradients={name: gradient for (_, name), gradient in expected.gradients.items()},
        parameters={name: parameter for (_, name), parameter in expected.parameters.items()},
        buffers=expected.buffers,
    )


class Allowed(Protocol):
    """What rounding alone may do to each value; asked only where bits differ."""

    def loss(self, microbatch: int) -> Floor:
        """Of a microbatch's loss."""

    def total(self) -> Floor:
        """Of the whole step's loss."""

    def norm(self) -> Floor:
        """Of the gradient norm."""

    def gradient(self, name: str) -> Floor:
        """Of a gradient."""

    def update(self, name: str) -> Floor:
        """Of a parameter's movement, but for what storing it does."""


_STILL = "vanish in rounding, by a rate of 0, or in the optimizer"


class Comparison:
    """Enters into ``ledger`` how what was seen of an operation agrees with ``due``.

    ``number`` is the operation's place in the plan, from 0; ``scenarios`` are the laws about that place.
    """

    def __init__(
        self,
        due: Due,
        allowed: Allowed,
        ledger: Ledger,
        *,
        number: int = 0,
        scenarios: frozenset[str] = frozenset(),
    ) -> None:
        self.due = due
        self.allowed = allowed
        self.ledger = ledger
        self.number = number
        self.scenarios = scenarios
        self._zeros: list[str] = []  # parameters that have them where no gradient is due
        self._nones: list[str] = []  # parameters without a gradient where zeros are due
        self._losses: dict[int, float] = {}  # those that were reported, by microbatch
        self.trained: dict[str, tuple[int | None, bool]] = {}  # the stage of what has a gradient; did it move?

    def onto(self, ledger: Ledger) -> "Comparison":
        """The same, entered into another ledger."""
        return Comparison(self.due, self.allowed, ledger, number=self.number, scenarios=self.scenarios)

    def held(self, name: str, count: int, *, due: int, stage: int | None = None, rank: int | None = None) -> None:
        """How many places hold a parameter."""
        place = self._at("parameters-once", parameter=name, stage=stage, rank=rank)
        self.ledger.hold(place, count == due, count, due, what="held")

    def losses(
        self,
        seen: Sequence[float],
        *,
        share: Sequence[int] | None = None,
        rank: int | None = None,
        broken: tuple[Action, int] | None = None,
    ) -> None:
        """The losses of all microbatches, or of a share of them, in the order of these.

        ``broken``: the first action whose output was not finite, and its rank, where that is known.
        """
        share = range(len(self.due.losses)) if share is None else share
        if not self._losses_are_known():
            return
        if len(seen) != len(share):
            self.ledger.hold(self._at("loss", rank=rank), False, len(seen), len(share), what="losses")
            return
        self._losses |= zip(share, seen, strict=True)
        for microbatch, one in zip(share, seen, strict=True):
            if broken is not None and math.isnan(one):
                self._not_finite(microbatch, *broken)
            else:
                place = self._at("loss", microbatch=microbatch, rank=rank)
                due = self.due.losses[microbatch]
                self.ledger.numbers(place, one, due, partial(self.allowed.loss, microbatch))

    def _not_finite(self, microbatch: int, first: Action, rank: int) -> None:
        """A microbatch's loss is NaN since action ``first`` on ``rank`` put out something that is not finite."""
        place = self._at("loss", rank=rank, stage=first.stage, microbatch=first.microbatch, action=str(first))
        told = f"nan in the loss of microbatch {microbatch}; the first output that is not finite is {first}'s"
        self.ledger.hold(place, False, math.nan, self.due.losses[microbatch], what="not-finite", told=told)

    def loss(self, seen: float, *, rank: int | None = None) -> None:
        """What the losses of all microbatches are together after division: of those that were reported, if all were."""
        wanted, every = self.due.loss, self.due.losses
        if wanted is not None and self._losses_are_known():
            reported = tuple(self._losses.get(microbatch, math.nan) for microbatch in range(len(every)))
            if reported != every and all(map(math.isfinite, reported)) and math.fsum(every):
                wanted *= math.fsum(reported) / math.fsum(every)
            self.ledger.numbers(self._at("loss", rank=rank), seen, wanted, self.allowed.total)

    def norm(self, seen: float, *, rank: int | None = None) -> None:
        """The gradient norm, NaN where it should have been reported."""
        wanted = self.due.norm
        if wanted is not None and math.isfinite(wanted):
            self.ledger.numbers(self._at("grad-norm", rank=rank), seen, wanted, self.allowed.norm)
        elif wanted is not None:
            self.ledger.doubt("grad-norm", f"the other norm is {wanted:.4g}: {_NOTHING}", Reason.NOT_FINITE)

    def gradient(self, name: str, seen: Tensor | None, *, rank: int | None = None, stage: int | None = None) -> None:
        """A parameter's gradient. None and zeros stand for each other: a sum over ranks that all have none is zeros."""
        wanted = self.due.gradients[name]
        place = self._at("presence", parameter=name, rank=rank, stage=stage)
        same = (seen is None) == (wanted is None)
        if not same and stands_for_none(seen) and stands_for_none(wanted):
            (self._zeros if seen is not None else self._nones).append(name)
            same = True
        self.ledger.hold(place, same, seen is not None, wanted is not None, what="gradient")
        if seen is None or wanted is None:
            return
        if not all_finite(wanted):
            self.ledger.leave_out("gradient", [name], "what it is compared with is not finite", Reason.NOT_FINITE)
            return
        if wanted.numel() and not any_nonzero(wanted) and not any_nonzero(seen):
            self.ledger.empty("gradient", "zero, as is due: no fault shows there")
        place = self._at("gradient", parameter=name, rank=rank, stage=stage)
        self.ledger.tensors(place, seen.detach(), wanted, partial(self.allowed.gradient, name))

    def follow(self, expected: Expected, observed: Mapping[Site, Gradient], update: Follow) -> None:
        """Let the norm and the weights be due that follow from the gradients that were ``observed``.

        Where these are right, so is the reference's norm, within its envelope.
        """
        norm, parameters = update(_given(expected, observed))
        wrong = any(one.law in ("presence", "gradient") for one in self.ledger.mismatches)
        named = {name: parameter for (_, name), parameter in parameters.items()}
        self.due = replace(self.due, norm=norm if wrong else self.due.norm, parameters=named)

    def parameter(self, name: str, seen: Tensor, *, rank: int | None = None, stage: int | None = None) -> None:
        """A parameter after the optimizer: how far it moved is what is judged."""
        wanted, before = self.due.parameters[name], self.due.before[name]
        if any_nan(wanted) or (all_finite(before) and not all_finite(wanted)):
            why = "what they are compared with is not finite"
            self.ledger.leave_out("updated-parameters", [name], why, Reason.NOT_FINITE)
            return
        gradient = self.due.gradients[name] if name in self.due.gradients else None
        moves = gradient is not None and any_nonzero(gradient)
        if moves:
            self.trained[name] = stage, not same_bits(wanted, before)
        rounded = may_be_rounded(gradient, before, wanted)

        def floor() -> Floor:
            return update_floor(self.allowed.update(name), before, wanted, gradient)

        place = self._at("updated-parameters", parameter=name, rank=rank, stage=stage)
        self.ledger.tensors(place, seen.detach(), wanted, floor, base=before, rounded=rounded)

    def start(self, name: str, seen: Tensor, *, rank: int | None = None, stage: int | None = None) -> None:
        """A parameter before the operation."""
        place = self._at("initial-weights", parameter=name, rank=rank, stage=stage)
        wanted = self.due.before[name]
        self.ledger.tensors(place, seen.detach(), wanted, partial(_exact, wanted))

    def buffer(self, name: str, seen: Tensor | None, *, rank: int | None = None, stage: int | None = None) -> None:
        """A buffer after the operation; None: nobody has it."""
        place = self._at("buffers", parameter=name, rank=rank, stage=stage)
        wanted = self.due.buffers[name] if name in self.due.buffers else None
        if seen is None or wanted is None:
            self.ledger.hold(place, False, seen is not None, wanted is not None, what="buffer")
        else:
            self.ledger.tensors(place, seen.detach(), wanted, partial(_exact, wanted))

    def outputs(
        self,
        name: str,
        seen: Sequence[Tensor],
        due: Sequence[Tensor],
        floor: Callable[[int], Floor],
        *,
        share: Sequence[int],
        rank: int,
    ) -> None:
        """What a rank put out under ``name`` for each microbatch of its ``share``; ``due`` and ``floor``: of all."""
        if len(seen) != len(share):
            place = self._at("outputs", rank=rank, output=name)
            self.ledger.hold(place, False, len(seen), len(share), what="outputs")
            return
        for microbatch, one in zip(share, seen, strict=True):
            place = self._at("outputs", microbatch=microbatch, rank=rank, output=name)
            self.ledger.tensors(place, one.detach(), due[microbatch], partial(floor, microbatch))

    def close(self) -> None:
        """Say what follows from all of it together, where there are no other operations."""
        self.tell()
        tell_of_unmoved(self.ledger, {self.number: self.trained.values()})

    def tell(self) -> None:
        """Say where zeros stand for nothing."""
        if self._zeros:
            told = f"zeros where no gradient is due: {first_few(self._zeros)}; an optimizer may still move them"
            self.ledger.remark("presence", told)
        if self._nones:
            told = (
                f"no gradient where zeros are due: {first_few(self._nones)}; an optimizer may leave those as they are"
            )
            self.ledger.remark("presence", told)

    def _losses_are_known(self) -> bool:
        losses = self.due.losses
        if all(map(math.isfinite, losses)) and (self.due.loss is None or math.isfinite(self.due.loss)):
            return True
        told = _text(losses if not all(map(math.isfinite, losses)) else [self.due.loss or 0.0])
        self.ledger.doubt("loss", f"the reference itself gives losses {told}: {_NOTHING}", Reason.NOT_FINITE)
        return False

    def _at(self, law: str, **where: object) -> Heading:
        return Heading.at(law, self.number, self.scenarios, **where)


def _given(expected: Expected, observed: Mapping[Site, Gradient]) -> dict[Site, Gradient]:
    """The gradients that the optimizer was given: those that were ``observed``, and of others the reference's.

    Where there are none at all, they were cleared before anybody saw them.
    """
    given = dict(expected.gradients)
    for site, due in expected.gradients.items() if any(one is not None for one in observed.values()) else ():
        seen, like = observed.get(site, due), expected.before[site[1]]
        if not (stands_for_none(seen) and stands_for_none(due)) and (seen is None or seen.shape == like.shape):
            given[site] = None if seen is None else seen.detach().to(like.device)
    return given


def tell_of_unmoved(ledger: Ledger, trained: Mapping[int, Collection[tuple[int | None, bool]]]) -> None:
    """Say what no step moves. Where no parameter of a stage moves in any operation, nothing shows of its updates.

    ``trained``: by operation, the stage of each parameter that has a gradient, and whether it moved.
    """
    every = {one for those in trained.values() for one in those}
    for stage in sorted({stage for stage, moved in every if not moved and (stage, True) not in every}, key=str):
        of = "" if stage is None else f" of stage {stage}"
        ledger.doubt("updated-parameters", f"no parameter{of} moves: steps {_STILL}", Reason.ROUNDING)
    for number, those in trained.items():
        if still := sum(not moved for _, moved in those):
            which = f"{still} of {len(those)} in operation {number + 1}"
            ledger.remark("updated-parameters", f"steps of {which} {_STILL}")


def leave_out(ledger: Ledger, due: Due, *, number: int = 0, names: Iterable[str] | None = None) -> None:
    """Count what operation ``number`` must give and nobody compared, once all have: a fault may hide in that.

    ``names``: the parameters to be compared, where those are not all.
    """
    compared = ledger.entered("presence", number)
    missed = [name for name in (due.gradients if names is None else names) if name not in compared]
    for law in ("presence", "gradient") if compared else ():
        ledger.leave_out(law, missed, "not compared")
    losses = ledger.entered("loss", number)
    if losses and None not in losses:  # the whole step's has all of them in it
        missing = [f"microbatch {m}" for m in range(len(due.losses)) if m not in losses]
        ledger.leave_out("loss", missing, "not compared")


def hold_claim(ledger: Ledger, claim: Claim, number: int, laws: frozenset[str] = frozenset()) -> None:
    """Enter what must hold between ranks in operation ``number``; ``laws`` are those about its place."""
    at = dict(zip(("stage", "parameter"), claim.site, strict=True), rank=claim.rank, beside=claim.beside)
    ledger.hold(Heading.at(claim.law, number, laws, **at), claim.holds, claim.seen, claim.expected)


_NOTHING = "there is nothing to compare with"


def _exact(wanted: Tensor) -> Floor:
    """The floor of what is only copied, or computed in one order alone."""
    return Floor(0.0, 0.0, 0.0, precision_of(wanted.dtype))


def _text(values: Sequence[float]) -> str:
    return first_few([f"{value:.4g}" for value in values])
