"""Why two records differ: judge each by its own config, then compare the two expectations.

So either the configs explain the numbers, by another order of sums or another answer, or a side is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from pipeproof.core.judge import one_thread
from pipeproof.core.measured import versions
from pipeproof.core.mismatch import small
from pipeproof.core.verdict import Crash, Verdict
from pipeproof.own.case import Case
from pipeproof.records.case_record import own_case, record_expected
from pipeproof.records.compare import RUNS, compare
from pipeproof.records.record import OtherSteps, Record, RecordError, config_differences
from pipeproof.worlds.accelerator import absence

# same: bit for bit. rounding: both are right, with equal expectations. asked: both are right, with different
# expectations. fault: a side is wrong by its own config. unknown: a side's expectation is not known, or
# not decided.
Reason = Literal["same", "rounding", "asked", "fault", "unknown"]
NAMES = ("one", "other")
# Config fields that may differ for one answer: another order of sums, or other kernels.
_ORDER = ("schedule", "pp", "virtual", "split", "device", "runtime", "options")
_BESIDE = ("specimen", *versions())  # config fields without an effect on the answer
_DECIDING = ("torch", "pipeproof")  # versions without which another answer may be expected
_EXPECTED = "expected.safetensors"


@dataclass(frozen=True)
class RecomputedRecord:
    """A record in a comparison, judged by its config.

    expected: the config's results, None if not computed; then ``lacks`` says why. line: its case.
    """

    expected: Record | None = None
    verdict: Verdict | None = None
    lacks: str = ""
    line: str = ""

    @property
    def outcome(self) -> str:
        """``pass``, ``fail``, ``unknown``, or ``not computed``."""
        return "not computed" if self.verdict is None else self.verdict.outcome

    def __str__(self) -> str:
        """Summarise the outcome in a few words."""
        if self.verdict is None:
            return f"not judged: {self.lacks}"
        if self.verdict.outcome == "pass":
            compared = sum(law.checked for law in self.verdict.laws)
            return f"right by its own config: {compared} comparisons, {self.verdict.tier}"
        if self.verdict.outcome == "unknown":
            return f"not decided by its own config: {self.verdict.reason}"
        first = "" if self.verdict.causes else "; first {0.law}, {0.where}".format(self.verdict.mismatches[0])
        return f"wrong by its own config: {self.verdict.reason}{first}"


def side_of(record: Record) -> RecomputedRecord:
    """Judge ``record`` by its config, without any planted fault, if this machine can compute it."""
    try:
        case = own_case(record)
        for name in _DECIDING:
            said, here = record.config.get(name), versions()[name]
            if said != here and not (said is None and name == "pipeproof"):  # older ones do not say that
                raise RecordError(f"it was recorded with {name} {said or 'of no known version'}, and this is {here}")
        if case.replicas > 1:
            raise RecordError(f"it has {case.replicas} replicas, and what is expected is recorded of one pipeline")
        if why := absence(case.device):
            raise RecordError(f"it was computed on {case.device}, and {why}")
    except RecordError as error:
        return RecomputedRecord(lacks=str(error))
    case = replace(case, specimen="")
    try:
        expected = record_expected(case)
        return RecomputedRecord(expected, compare(expected, record), line=str(case))
    except Exception as error:  # no one type: memory may not suffice, and any program may have written it
        return RecomputedRecord(lacks=f"it could not be: {Crash.of(error).said}", line=str(case))


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
    sides = side_of(one), side_of(other)
    lines = [  # with which to look at a side that is not known to be right
        line
        for side, file in zip(sides, files, strict=True)
        if side.outcome in ("fail", "unknown")
        for line in (f"pipeproof record {side.line} --record {_EXPECTED}", f"pipeproof compare {_EXPECTED} {file}")
    ]
    made = partial(Difference, sides=sides, next=tuple(lines))
    if wrong := [name for name, side in zip(NAMES, sides, strict=True) if side.outcome == "fail"]:
        by = "are wrong by their own configs" if len(wrong) > 1 else "is wrong by its own config"
        return made("fault", f"a fault: {' and '.join(wrong)} {by}")
    right = [side.expected for side in sides if side.outcome == "pass" and side.expected is not None]
    if len(right) < len(sides):
        return made("unknown", "not known: it takes two sides that are known to be right by their own configs")
    try:
        asked = compare(right[0], right[1], sides=RUNS)
    except OtherSteps as error:
        asked = other_steps(error)
    differing = tuple(name for name, *_ in config_differences(one, other) if name not in _BESIDE)
    layers = {Case.parse(side.line).layers for side in sides}  # a split into as many only reorders sums
    order = tuple(name for name in differing if name in _ORDER and (name != "split" or len(layers) == 1))
    # That is known of a config by its words, where numbers of a coarse dtype leave it open.
    alone = asked.outcome == "unknown" and order == differing
    both = "both are right by their own configs"
    if order and (asked.outcome == "pass" or alone):
        said = f"rounding: {both}, which ask for the same answer; {_they_differ(order)}"
        return made("rounding", said, order, _size(one, other, right[0]))
    if asked.outcome == "pass":
        why = "no field that orders sums differs, so every bit should agree: run each again to see which one varies"
        said = f"not known: {both}, which ask for the same answer; {why}"
        return made("unknown", said, size=_size(one, other, right[0]))
    fields = tuple(name for name in differing if name not in order)
    if asked.outcome == "unknown" or (asked.laws and not fields):
        said = f"not known: {both}; whether these ask for the same answer is not decided: {asked.reason}"
        return made("unknown", said)
    why = _they_differ(fields) if fields else "no field says why"
    return made("asked", f"another answer was asked for: {both}; {why}", fields)


def _size(one: Record, other: Record, expected: Record) -> str:
    """The largest gradient difference, in units of rounding, which ``expected`` of the first knows."""
    pairs = zip(one.operations, expected.operations, strict=True)
    floored = tuple(replace(its, floors=wanted.floors) for its, wanted in pairs)
    with one_thread():
        numbers = compare(replace(one, operations=floored), other, sides=RUNS)
    found = [each for each in numbers.measured.of("gradient") if each.error and each.floor]
    if not found:
        return ""
    worst = max(found, key=lambda each: each.error / (each.floor or 1.0))
    return f"a gradient by {small(worst.error)}, where rounding alone makes {small(worst.floor or 0.0)}"


def other_steps(error: OtherSteps) -> Verdict:
    """Build the verdict for two records that differ before any comparison."""
    return Verdict("two records", "fail", "none", (), headline=error.reason, sides=RUNS)


def _they_differ(names: Sequence[str]) -> str:
    """Say of these fields, as in a sentence, that they differ."""
    listed = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return f"{listed} differ{'s' * (len(names) == 1)}"
