"""One operation held against what a record says of it, number by number as they come."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from validation.judging.ledger import Heading, Ledger
from validation.judging.tolerance import Floor, may_be_rounded, update_floor
from validation.judging.verdict import Mismatch
from validation.records.record import Place, RecordedOperation, unmeasured

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

    def held(self, counts: Mapping[str, int], *, copies: Collection[str] | None = ()) -> None:
        """How many places hold each parameter. ``copies`` may be in several; None: nobody knows which."""
        due = dict.fromkeys([*self._expected.before, *self._expected.gradients])
        for name in dict.fromkeys([*due, *counts]):
            count, wanted = counts.get(name, 0), int(name in due)
            if count > 1 and wanted and copies is None:
                why = f"{name} is in {count} stages: as copies of one weight, or by a mistake"
                self._ledger.doubt("parameters-once", f"{why}; the model beside the job would tell")
            count = 1 if count > 1 and wanted and (copies is None or name in copies) else count
            self._ledger.hold(
                self._at("parameters-once", parameter=name),
                count == wanted,
                f"held {count} times",
                f"held {wanted} times",
            )

    def losses(self, seen: Sequence[float], share: Sequence[int] | None = None) -> None:
        """The losses of these microbatches (None: of all)."""
        expected, floors = self._expected.losses, self._expected.floors
        if not all(map(math.isfinite, expected)):
            self._ledger.doubt("loss", f"the losses expected are {_text(expected)}: there is nothing to compare with")
            return
        own = range(len(expected)) if share is None else share
        if len(seen) != len(own):
            self._ledger.hold(self._at("loss"), False, f"{len(seen)} losses", f"{len(own)} losses")
            return
        for microbatch, one in zip(own, seen, strict=True):
            floor = unmeasured() if floors is None else floors.losses[microbatch]
            self._number_of(self._at("loss", microbatch=microbatch), one, expected[microbatch], floor)

    def loss(self, seen: float | None, share: Sequence[int] | None = None) -> None:
        """What the losses are together after division, where both sides say it: of all, or of these as if all."""
        wanted, every = self._expected.loss, self._expected.losses
        if share and seen is not None and wanted and math.fsum(every):
            own = wanted * math.fsum(every[k] for k in share) / math.fsum(every) * len(every) / len(share)
            wanted = min(wanted, own, key=lambda one: abs(one - seen))
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
            floor = unmeasured(wanted) if floors is None else floors.gradients[name]
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
            gradient = replace(unmeasured(wanted), fault=2 * _LOST) if floors is None else floors.gradients[name]
            place = self._at("updated-parameters", parameter=name)
            floor = partial(update_floor, gradient, before, wanted)
            rounded = may_be_rounded(self._expected.gradients.get(name), before, wanted.cpu())
            self._ledger.tensors(place, seen[name].detach().cpu(), wanted.cpu(), floor, base=before, rounded=rounded)

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
        first = found[0] if found else (None if parameter else self._rank, None)
        rank, stage = next((place for place in found if place[0] == self._rank), first)
        where = Mismatch(
            law, self._number + 1, "", "", rank=rank, stage=stage, microbatch=microbatch, parameter=parameter
        )
        return Heading(law, frozenset(), where)


def _presence(tensor: Tensor | None) -> str:
    return "None" if tensor is None else "a gradient"


def _held(there: bool) -> str:
    return "a buffer" if there else "no such buffer"


def _text(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
