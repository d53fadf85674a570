"""Compare an operation with its expected values one tensor at a time.

Serves steps, records and jobs: a rank with one stage can compare it in place.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

from torch import Tensor

from pipeproof.core.ledger import Ledger, Where
from pipeproof.core.limits import precision_of
from pipeproof.core.mismatch import Mismatch
from pipeproof.core.observe.elements import all_finite, any_nan, any_nonzero
from pipeproof.core.observe.observed import Claim
from pipeproof.core.reason import Reason
from pipeproof.core.tolerance import Floor, default_floor, same_bits, stands_for_none, update_floor
from pipeproof.pipeline.action import Action
from pipeproof.pipeline.sizes import first_few
from pipeproof.reference.step import Expected, Gradient, Site

Follow = Callable[[Mapping[Site, Gradient]], tuple[float, Mapping[Site, Tensor]]]  # gradients to norm and parameters


@dataclass(frozen=True)
class ExpectedOperation:
    """Expected values for an operation. Tensors go by model names and load on access.

    microbatches: content digests, if taken. before: parameters at the start, if known. gradients: after tied copies are
    summed, before clipping. parameters: after the optimizer. Both are empty if the operation produces none. loss: total
    after division; None if unreported.
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


def expect_operation(expected: Expected) -> ExpectedOperation:
    """Convert the reference's expectation, keyed by parameter names."""
    return ExpectedOperation(
        expected.operation,
        (),
        expected.losses,
        None if expected.operation == "accumulate" else expected.loss,  # accumulation reports no total
        expected.norm,
        before=expected.before,
        gradients={name: gradient for (_, name), gradient in expected.gradients.items()},
        parameters={name: parameter for (_, name), parameter in expected.parameters.items()},
        buffers=expected.buffers,
    )


@dataclass(frozen=True)
class Allowed:
    """Rounding floors per value: ``floor`` for all, unless a subclass measures more, where bits differ."""

    floor: Floor = field(default_factory=default_floor, kw_only=True)

    def loss(self, microbatch: int) -> Floor:
        """Floor for a microbatch's loss."""
        return self.total()

    def total(self) -> Floor:
        """Floor for the step's total."""
        return self.floor

    def norm(self) -> Floor:
        """Floor for the gradient norm."""
        return self.total()

    def gradient(self, name: str) -> Floor:
        """Floor for a gradient."""
        return self.total()

    def update(self, name: str) -> Floor:
        """Floor for a parameter's movement, storage rounding excluded."""
        return self.gradient(name)


_STILL = "vanish in rounding, by a rate of 0, or in the optimizer"


@dataclass
class Comparison:
    """Compares an operation's observed values with ``expected``, and fills ``ledger``.

    number: the operation's index in the plan, from 0. trained: parameters with gradients: their stage, and whether they
    moved.
    """

    expected: ExpectedOperation
    allowed: Allowed
    ledger: Ledger
    number: int = field(default=0, kw_only=True)
    trained: dict[str, tuple[int | None, bool]] = field(default_factory=dict, init=False)
    _zeros: list[str] = field(default_factory=list, init=False)  # parameters with zeros where None is expected
    _nones: list[str] = field(default_factory=list, init=False)  # parameters with None where zeros are expected
    _losses: dict[int, float] = field(default_factory=dict, init=False)  # reported losses, by microbatch

    def count_holders(
        self, names: Collection[str], counts: Mapping[str, int], places: Mapping[str, Sequence[tuple[int, int]]]
    ) -> None:
        """Check, by ``counts``, that one place holds each of ``names``, and none another. places: ranks and stages."""
        for name in dict.fromkeys([*names, *counts]):
            rank, stage = next(iter(places.get(name, ())), (None, None))
            place = self._at("parameters-once", parameter=name, stage=stage, rank=rank)
            count, expected = counts.get(name, 0), int(name in names)
            self.ledger.hold(place, count == expected, count, expected, what="held")

    def losses(
        self,
        observed: Sequence[float],
        *,
        share: Sequence[int] | None = None,
        rank: int | None = None,
        broken: tuple[Action, int] | None = None,
    ) -> None:
        """Compare microbatch losses, in order of ``share`` (default: all).

        broken: the first action with a non-finite output, and its rank, if known.
        """
        share = range(len(self.expected.losses)) if share is None else share
        if not self._losses_are_known():
            return
        if len(observed) != len(share):
            self.ledger.hold(self._at("loss", rank=rank), False, len(observed), len(share), what="losses")
            return
        self._losses |= zip(share, observed, strict=True)
        for microbatch, one in zip(share, observed, strict=True):
            expected = self.expected.losses[microbatch]
            if broken is not None and math.isnan(one):
                first, rank_of_first = broken
                where = {"stage": first.stage, "microbatch": first.microbatch, "action": str(first)}
                place = self._at("loss", rank=rank_of_first, **where)
                text = f"nan in the loss of microbatch {microbatch}; the first output that is not finite is {first}'s"
                self.ledger.hold(place, False, math.nan, expected, what="not-finite", text=text)
            else:
                place = self._at("loss", microbatch=microbatch, rank=rank)
                self.ledger.numbers(place, one, expected, partial(self.allowed.loss, microbatch))

    def loss(self, observed: float, *, rank: int | None = None) -> None:
        """Compare the step's total, expected from the reported losses if complete."""
        wanted, every = self.expected.loss, self.expected.losses
        if wanted is not None and self._losses_are_known():
            reported = tuple(self._losses.get(microbatch, math.nan) for microbatch in range(len(every)))
            if reported != every and all(map(math.isfinite, reported)) and math.fsum(every):
                wanted *= math.fsum(reported) / math.fsum(every)
            self.ledger.numbers(self._at("loss", rank=rank), observed, wanted, self.allowed.total)

    def norm(self, observed: float, *, rank: int | None = None) -> None:
        """Compare the gradient norm. NaN means missing."""
        wanted = self.expected.norm
        if wanted is not None and math.isfinite(wanted):
            self.ledger.numbers(self._at("grad-norm", rank=rank), observed, wanted, self.allowed.norm)
        elif wanted is not None:
            self.ledger.doubt("grad-norm", f"the other norm is {wanted:.4g}: {_NOTHING}", Reason.NOT_FINITE)

    def gradient(self, name: str, observed: Tensor | None, **where: Unpack[Where]) -> None:
        """Compare a parameter's gradient. None and zeros are equal: a sum over ranks turns None into zeros."""
        wanted = self.expected.gradients[name]
        place = self._at("presence", parameter=name, **where)
        same = (observed is None) == (wanted is None)
        if not same and stands_for_none(observed) and stands_for_none(wanted):
            (self._zeros if observed is not None else self._nones).append(name)
            same = True
        self.ledger.hold(place, same, observed is not None, wanted is not None, what="gradient")
        if observed is None or wanted is None:
            return
        if not all_finite(wanted):
            self.ledger.leave_out("gradient", [name], "the expected value is not finite", Reason.NOT_FINITE)
            return
        if wanted.numel() and not any_nonzero(wanted) and not any_nonzero(observed):
            self.ledger.empty("gradient", "zero, as is expected: no fault shows there")
        place = self._at("gradient", parameter=name, **where)
        self.ledger.tensors(place, observed.detach(), wanted, partial(self.allowed.gradient, name))

    def follow(self, expected: Expected, observed: Mapping[Site, Gradient], update: Follow) -> None:
        """Derive the expected norm and weights from ``observed`` gradients, and the reference's where none is observed.

        If all gradients are right, the reference's norm stays, with its envelope.
        """
        given = dict(expected.gradients)
        cleared = all(one is None for one in observed.values())  # before the hand-back
        for site, right in expected.gradients.items() if not cleared else ():
            own, like = observed.get(site, right), expected.before[site[1]]
            if not (stands_for_none(own) and stands_for_none(right)) and (own is None or own.shape == like.shape):
                given[site] = None if own is None else own.detach().to(like.device)
        norm, parameters = update(given)
        wrong = any(one.law in ("presence", "gradient") for one in self.ledger.mismatches)
        named = {name: parameter for (_, name), parameter in parameters.items()}
        self.expected = replace(self.expected, norm=norm if wrong else self.expected.norm, parameters=named)

    def parameter(self, name: str, observed: Tensor, **where: Unpack[Where]) -> None:
        """Compare a parameter's movement in the optimizer step."""
        wanted, before = self.expected.parameters[name], self.expected.before[name]
        if any_nan(wanted) or (all_finite(before) and not all_finite(wanted)):
            why = "the expected values are not finite"
            self.ledger.leave_out("updated-parameters", [name], why, Reason.NOT_FINITE)
            return
        gradient = self.expected.gradients[name] if name in self.expected.gradients else None
        driven, moved = gradient is not None and any_nonzero(gradient), not same_bits(wanted, before)
        if driven:
            self.trained[name] = where.get("stage"), moved

        def floor() -> Floor:
            return update_floor(self.allowed.update(name), before, wanted, gradient)

        place = self._at("updated-parameters", parameter=name, **where)
        self.ledger.tensors(place, observed.detach(), wanted, floor, base=before, rounded=driven or moved)

    def start(self, name: str, observed: Tensor, **where: Unpack[Where]) -> None:
        """Compare a parameter before the operation."""
        place = self._at("initial-weights", parameter=name, **where)
        wanted = self.expected.before[name]
        self.ledger.tensors(place, observed.detach(), wanted, partial(exact, wanted))

    def buffer(self, name: str, observed: Tensor | None, **where: Unpack[Where]) -> None:
        """Compare a buffer after the operation. None: absent on all ranks."""
        place = self._at("buffers", parameter=name, **where)
        wanted = self.expected.buffers[name] if name in self.expected.buffers else None
        if observed is None or wanted is None:
            self.ledger.hold(place, False, observed is not None, wanted is not None, what="buffer")
        else:
            self.ledger.tensors(place, observed.detach(), wanted, partial(exact, wanted))

    def outputs(
        self,
        name: str,
        observed: Sequence[Tensor],
        expected: Sequence[Tensor],
        floor: Callable[[int], Floor],
        *,
        share: Sequence[int],
        rank: int,
    ) -> None:
        """Compare a rank's outputs called ``name``, one per microbatch in ``share``.

        ``expected`` and ``floor`` cover all microbatches.
        """
        if len(observed) != len(share):
            place = self._at("outputs", rank=rank, output=name)
            self.ledger.hold(place, False, len(observed), len(share), what="outputs")
            return
        for microbatch, one in zip(share, observed, strict=True):
            place = self._at("outputs", microbatch=microbatch, rank=rank, output=name)
            self.ledger.tensors(place, one.detach(), expected[microbatch], partial(floor, microbatch))

    def close(self) -> None:
        """Enter conclusions from the whole operation, for a plan without others."""
        self.tell()
        tell_of_unmoved(self.ledger, {self.number: self.trained.values()})

    def tell(self) -> None:
        """Remark on zeros beside None."""
        for names, beside, does in (
            (self._zeros, "zeros where no gradient is", "still move them"),
            (self._nones, "no gradient where zeros are", "leave those alone"),
        ):
            if names:
                note = f"{beside} expected: {first_few(names)}; an optimizer may {does}"
                self.ledger.remark("presence", note)

    def _losses_are_known(self) -> bool:
        losses, total = self.expected.losses, self.expected.loss
        endless = losses if not all(map(math.isfinite, losses)) else [total] if total is not None else []
        if all(map(math.isfinite, endless)):
            return True
        text = first_few([f"{value:.4g}" for value in endless])
        self.ledger.doubt("loss", f"the reference itself gives losses {text}: {_NOTHING}", Reason.NOT_FINITE)
        return False

    def _at(self, law: str, **where: Any) -> Mismatch:
        return Mismatch(law, self.number + 1, **where)


def tell_of_unmoved(ledger: Ledger, trained: Mapping[int, Collection[tuple[int | None, bool]]]) -> None:
    """Remark on unmoved parameters, and doubt updates of stages where nothing ever moved.

    trained: per operation, each trained parameter's stage, and whether it moved.
    """
    every = {one for those in trained.values() for one in those}
    for stage in sorted({stage for stage, moved in every if not moved and (stage, True) not in every}, key=str):
        of = "" if stage is None else f" of stage {stage}"
        ledger.doubt("updated-parameters", f"no parameter{of} moves: steps {_STILL}", Reason.ROUNDING)
    for number, those in trained.items():
        if still := sum(not moved for _, moved in those):
            which = f"{still} of {len(those)} in operation {number + 1}"
            ledger.remark("updated-parameters", f"steps of {which} {_STILL}")


def leave_out(
    ledger: Ledger, expected: ExpectedOperation, *, number: int = 0, names: Iterable[str] | None = None
) -> None:
    """List expected values that operation ``number`` never compared. A fault may hide there.

    names: parameters to compare, if not all.
    """
    compared = ledger.compared_names("presence", number)
    missed = [name for name in (expected.gradients if names is None else names) if name not in compared]
    for law in ("presence", "gradient") if compared else ():
        ledger.leave_out(law, missed, "not compared")
    losses = ledger.compared_names("loss", number)
    if losses and None not in losses:  # a step's total includes all of them
        missing = [f"microbatch {m}" for m in range(len(expected.losses)) if m not in losses]
        ledger.leave_out("loss", missing, "not compared")


def hold_claim(ledger: Ledger, claim: Claim, number: int) -> None:
    """Enter a claim between ranks for operation ``number``."""
    stage, name = claim.site
    place = Mismatch(claim.law, number + 1, rank=claim.rank, stage=stage, parameter=name, beside=claim.beside)
    ledger.hold(place, claim.holds, claim.observed, claim.expected)


_NOTHING = "there is nothing to compare with"


def exact(wanted: Tensor) -> Floor:
    """Return a zero floor, for copies and fixed-order results."""
    return Floor(0.0, 0.0, 0.0, precision_of(wanted.dtype))
