"""Why two records differ: judge each by its own config, then compare the two expectations.

So either the configs explain the numbers, by another order of sums or another answer, or a side is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from pipeproof.core.judge import one_thread
from pipeproof.core.measured import versions
from pipeproof.core.mismatch import small
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case
from pipeproof.records.compare import RUNS, compare
from pipeproof.records.recomputed_record import RecomputedRecord, side_of
from pipeproof.records.record import OtherSteps, Record, config_differences

# same: bit for bit. rounding: both are right, with equal expectations. asked: both are right, with different
# expectations. fault: a side is wrong by its own config. unknown: a side's expectation is not known, or
# not decided.
Reason = Literal["same", "rounding", "asked", "fault", "unknown"]
NAMES = ("one", "other")
# Config fields that may differ for one answer: another order of sums, or other kernels.
_ORDER = ("schedule", "pp", "virtual", "split", "device", "runtime", "options")
_BESIDE = ("specimen", *versions())  # config fields without an effect on the answer


@dataclass(frozen=True)
class Difference:
    """The reason why two records differ.

    fields: config fields that explain it. size: its magnitude, if rounding. next: commands to run.
    """

    reason: Reason
    said: str
    fields: tuple[str, ...] = ()
    size: str = ""
    sides: tuple[RecomputedRecord, ...] = ()
    next: tuple[str, ...] = ()

    @property
    def rows(self) -> list[tuple[str, str]]:
        """All parts with their names."""
        named = zip(NAMES, map(str, self.sides), strict=False)
        size = [("most", self.size)] if self.size else []
        return [("why", self.said), *size, *named, *(("next", line) for line in self.next)]

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        sides = [{"outcome": side.outcome, "said": str(side)} for side in self.sides]
        return {**vars(self), "sides": sides}


def difference(one: Record, other: Record, numbers: Verdict | OtherSteps, files: tuple[str, str]) -> Difference:
    """Explain why the records in ``files`` differ; ``numbers``: their comparison, or ``OtherSteps``."""
    if isinstance(numbers, Verdict) and numbers.tier == "bitwise":
        return Difference("same", "every number that was compared agrees bit for bit: there is nothing to explain")
    return _Pair(one, other, (side_of(one), side_of(other)), files).difference


@dataclass(frozen=True)
class _Pair:
    """Two records, each judged by its config."""

    one: Record
    other: Record
    sides: tuple[RecomputedRecord, RecomputedRecord]
    files: tuple[str, str]

    @cached_property
    def differing(self) -> tuple[str, ...]:
        """Config fields with different values."""
        found = (name for name, *_ in config_differences(self.one, self.other))
        return tuple(name for name in found if name not in _BESIDE)

    @property
    def difference(self) -> Difference:
        """Reason for the difference."""
        if wrong := self._that_are("fail"):
            names = " and ".join(wrong)
            said = f"a fault: {names} {'are' if len(wrong) > 1 else 'is'} wrong by {_whose(wrong)}"
            return self._difference("fault", said)
        if self._that_are("pass") != list(NAMES):
            return self._difference(
                "unknown", "not known: it takes two sides that are known to be right by their own configs"
            )
        return self._of_right_ones()

    def _of_right_ones(self) -> Difference:
        """Decide whether both configs ask for the same answer."""
        asked, right = self._judge_config(), "both are right by their own configs"
        order = self._ordering
        # That is known of a config by its words, where numbers of a coarse dtype leave it open.
        alone = asked.outcome == "unknown" and order == self.differing
        if order and (asked.outcome == "pass" or alone):
            by = f"{_list(order)} differ{'s' * (len(order) == 1)}"
            said = f"rounding: {right}, which ask for the same answer; {by}"
            return self._difference("rounding", said, fields=order, size=self._size())
        if asked.outcome == "pass":
            why = "no field that orders sums differs, so every bit should agree: run each again to see which one varies"
            said = f"not known: {right}, which ask for the same answer; {why}"
            return self._difference("unknown", said, size=self._size())
        fields = tuple(name for name in self.differing if name not in order)
        if asked.outcome == "unknown" or (asked.laws and not fields):
            said = f"not known: {right}; whether these ask for the same answer is not decided: {asked.reason}"
            return self._difference("unknown", said)
        by = f"{_list(fields)} differ{'s' * (len(fields) == 1)}" if fields else "no field says why"
        return self._difference("asked", f"another answer was asked for: {right}; {by}", fields=fields)

    @property
    def _ordering(self) -> tuple[str, ...]:
        """Differing fields that may only reorder sums: a split into as many layers, but not into more."""
        one, other = (Case.parse(side.line).layers for side in self.sides)
        return tuple(name for name in self.differing if name in _ORDER and (name != "split" or one == other))

    def _judge_config(self) -> Verdict:
        """Judge one config's expectation by the other's."""
        one, other = (side.expected for side in self.sides)
        assert one is not None, "it was judged by it"
        assert other is not None, "it was judged by it"
        try:
            return compare(one, other, sides=RUNS)
        except OtherSteps as error:
            return other_steps(error)

    def _size(self) -> str:
        """The largest gradient difference, in units of rounding."""
        expected = self.sides[0].expected
        assert expected is not None, "it was judged by it"
        pairs = zip(self.one.operations, expected.operations, strict=True)
        floored = tuple(replace(one, floors=wanted.floors) for one, wanted in pairs)
        with one_thread():
            numbers = compare(replace(self.one, operations=floored), self.other, sides=RUNS)
        found = [one for one in numbers.measured.of("gradient") if one.error and one.floor]
        if not found:
            return ""
        worst = max(found, key=lambda one: one.error / (one.floor or 1.0))
        return f"a gradient by {small(worst.error)}, where rounding alone makes {small(worst.floor or 0.0)}"

    def _difference(self, reason: Reason, said: str, *, fields: Sequence[str] = (), size: str = "") -> Difference:
        lines = [line for side, file in zip(self.sides, self.files, strict=True) for line in side.next(file)]
        return Difference(reason, said, tuple(fields), size, self.sides, tuple(lines))

    def _that_are(self, outcome: str) -> list[str]:
        return [name for name, side in zip(NAMES, self.sides, strict=True) if side.outcome == outcome]


def other_steps(error: OtherSteps) -> Verdict:
    """Build the verdict for two records that differ before any comparison."""
    return Verdict("two records", "fail", "none", (), headline=error.reason, sides=RUNS)


def _whose(names: Sequence[str]) -> str:
    return "their own configs" if len(names) > 1 else "its own config"


def _list(names: Sequence[str]) -> str:
    """Join names as in a sentence."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
