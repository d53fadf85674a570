"""One operation held against what a record says of it, number by number as they come."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from validation.judging.ledger import Heading, Ledger
from validation.judging.tolerance import Floor, may_be_rounded, precision_of, unmeasured, update_floor
from validation.judging.verdict import Mismatch
from validation.records.record import Place, RecordedOperation

LAWS = (
    "parameters-once",  # every parameter of the one is in exactly one place of the other
    "loss",  # each microbatch's, and the whole operation's
    "none-ness",  # a gradient is None exactly where the other is
    "gradient",  # every parameter's
    "grad-norm",  # over logical parameters
    "updated-parameters",  # after clip and optimizer step
    "buffers",  # what forwards leave behind, such as running statistics
)
_EXACT = Floor(0.0, 0.0, 0.0)
_LOST = 1 / 64  # of an update: as much as a fault changes, where nobody measured the smallest


class Against:
    """Enters into ``ledger`` how what was seen of an operation agrees with ``expected``.

    ``number`` is the operation's place in the plan, from 0. ``places`` are where what is seen lies, as far as is known,
    and ``rank`` is who says what lies nowhere, where that is one rank.
    """

    def __init__(
        self,
        expected: RecordedOperation,
        ledger: Ledger,
        *,
        number: int = 0,
        places: Mapping[str, Sequence[Place]],
        rank: int | None = None,
    ) -> None:
        self._expected = expected
        self._ledger = ledger
        self._number = number
        self._places = places
        self._rank = rank

    def held(self, counts: Mapping[str, int]) -> None:
        """How many places hold each parameter."""
        due = dict.fromkeys([*self._expected.before, *self._expected.gradients])
        for name in dict.fromkeys([*due, *counts]):
            count, wanted = counts.get(name, 0), int(name in due)
            self._ledger.hold(
                self._at("parameters-once", parameter=name),
                count == wanted,
                f"held {count} times",
                f"held {wanted} times",
            )

    def losses(self, seen: Sequence[float]) -> None:
        """The microbatches' losses."""
        expected, floors = self._expected.losses, self._expected.floors
        if not all(map(math.isfinite, expected)):
            self._ledger.doubt("loss", f"the losses expected are {_text(expected)}: there is nothing to compare with")
            return
        if len(seen) != len(expected):
            self._ledger.hold(self._at("loss"), False, f"{len(seen)} losses", f"{len(expected)} losses")
            return
        for microbatch, (one, wanted) in enumerate(zip(seen, expected, strict=True)):
            floor = unmeasured() if floors is None else floors.losses[microbatch]
            self._number_of(self._at("loss", microbatch=microbatch), one, wanted, floor)

    def loss(self, seen: float | None) -> None:
        """What the losses are together after division, where both sides say it."""
        wanted = self._expected.loss
        if seen is not None and wanted is not None and math.isfinite(wanted):
            self._number_of(self._at("loss"), seen, wanted, unmeasured())

    def gradients(self, seen: Mapping[str, Tensor | None]) -> None:
        """Gradients by name. From the last stage down, as they flow: the first to differ is nearest to the fault."""
        zero = []
        for name in self._upstream(self._expected.gradients):
            if name not in seen:
                continue  # parameters-once says so
            one, wanted = seen[name], self._expected.gradients[name]
            same = (one is None) == (wanted is None)
            self._ledger.hold(self._at("none-ness", parameter=name), same, _presence(one), _presence(wanted))
            if one is None or wanted is None:
                continue
            if not wanted.any():
                zero.append(name)
            floors = self._expected.floors
            floor = unmeasured(precision_of(wanted.dtype)) if floors is None else floors.gradients[name]
            self._tensors(self._at("gradient", parameter=name), one, wanted, floor)
        if zero:
            more = f" and of {len(zero) - 1} more" * (len(zero) > 1)
            self._ledger.doubt("gradient", f"the expected gradient of {zero[0]}{more} is zero: nothing could be seen")

    def norm(self, seen: float | None) -> None:
        """The gradient norm; None is one that nobody computed."""
        wanted, floors = self._expected.norm, self._expected.floors
        if wanted is not None:
            floor = unmeasured() if floors is None else floors.norm
            self._number_of(self._at("grad-norm"), math.nan if seen is None else seen, wanted, floor)

    def parameters(self, seen: Mapping[str, Tensor]) -> None:
        """Parameters after the optimizer, by name: how far they moved is what is judged."""
        for name in (name for name in self._expected.parameters if name in seen):
            wanted = self._expected.parameters[name]
            before, floors = self._expected.before[name].cpu(), self._expected.floors
            gradient = (
                replace(unmeasured(precision_of(wanted.dtype)), fault=2 * _LOST)
                if floors is None
                else floors.gradients[name]
            )
            place = self._at("updated-parameters", parameter=name)
            floor = partial(update_floor, gradient, before, wanted)
            rounded = may_be_rounded(self._expected.gradients.get(name), before, wanted.cpu())
            self._ledger.tensors(place, seen[name].detach().cpu(), wanted.cpu(), floor, base=before, rounded=rounded)

    def whole(self, seen: RecordedOperation) -> None:
        """Doubt what only one side has: it was not compared."""
        if self._expected.norm is None:
            self._ledger.doubt("grad-norm", "no norm is expected, so there is nothing to compare with")
        for law, due, found in (
            ("gradient", self._expected.gradients, seen.gradients),
            ("updated-parameters", self._expected.parameters, seen.parameters),
        ):
            apart = [name for name in {**due, **found} if name not in due or name not in found]
            if apart:
                self._ledger.doubt(law, not_compared("seen" if apart[0] in due else "expected", apart))

    def buffers(self, seen: Mapping[str, Tensor]) -> None:
        """Buffers after the operation, by name."""
        for name in dict.fromkeys([*self._expected.buffers, *seen]):
            place = self._at("buffers", parameter=name)
            if name not in seen or name not in self._expected.buffers:
                self._ledger.hold(place, False, _held(name in seen), _held(name not in seen))
            else:
                self._tensors(place, seen[name], self._expected.buffers[name], _EXACT)

    def _upstream(self, names: Iterable[str]) -> list[str]:
        """From the last stage to the first; from the last of the model's parameters, where stages are not known."""
        listed = list(names)
        stages = {name: self._places[name][0][1] if self._places.get(name) else 0 for name in listed}
        return sorted(listed[::-1], key=lambda name: -stages[name])

    def _tensors(self, place: Heading, seen: Tensor, wanted: Tensor, floor: Floor) -> None:
        self._ledger.tensors(place, seen.detach().cpu(), wanted.cpu(), lambda: floor)

    def _number_of(self, place: Heading, seen: float, wanted: float, floor: Floor) -> None:
        self._ledger.numbers(place, seen, wanted, lambda: floor)

    def _at(self, law: str, *, parameter: str | None = None, microbatch: int | None = None) -> Heading:
        found = self._places.get(parameter or "", ())
        rank, stage = found[0] if found else (None if parameter else self._rank, None)
        where = Mismatch(
            law, self._number + 1, "", "", rank=rank, stage=stage, microbatch=microbatch, parameter=parameter
        )
        return Heading(law, frozenset(), where)


def not_compared(side: str, names: Sequence[str]) -> str:
    """What to say of parameters that one side lacks: nothing of them is ``seen``, or ``expected``."""
    more = f", nor of {len(names) - 1} more" * (len(names) > 1)
    return f"nothing is {side} of {names[0]}{more}, so it was not compared"


def _presence(tensor: Tensor | None) -> str:
    return "None" if tensor is None else "a gradient"


def _held(there: bool) -> str:
    return "a buffer" if there else "no such buffer"


def _text(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
