"""A record, judged by its config: recomputed on one device."""

from dataclasses import dataclass, replace

from pipeproof.core.measured import versions
from pipeproof.core.verdict import Crash, Verdict
from pipeproof.own.case import Case
from pipeproof.records.case_record import own_case, record_expected
from pipeproof.records.compare import compare
from pipeproof.records.record import Record, RecordError
from pipeproof.worlds.accelerator import absence

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
        reason, (first, *_) = self.verdict.reason, self.verdict.mismatches
        return f"wrong by its own config: {reason}" + (
            "" if self.verdict.causes else f"; first {first.law}, {first.where}"
        )

    def next(self, file: str) -> list[str]:
        """Commands that show all details."""
        if self.outcome not in ("fail", "unknown"):
            return []
        return [f"pipeproof record {self.line} --record {_EXPECTED}", f"pipeproof compare {_EXPECTED} {file}"]


def side_of(record: Record) -> RecomputedRecord:
    """Judge ``record`` by its config, without any planted fault."""
    try:
        case = replace(_case_of(record), specimen="")
    except RecordError as error:
        return RecomputedRecord(lacks=str(error))
    try:
        expected = record_expected(case)
        return RecomputedRecord(expected, compare(expected, record), line=str(case))
    except Exception as error:  # no one type: memory may not suffice, and any program may have written it
        return RecomputedRecord(lacks=f"it could not be: {Crash.of(error).said}", line=str(case))


def _case_of(record: Record) -> Case:
    """Return the record's case, if this machine can compute it. Raises ``RecordError`` otherwise."""
    case = own_case(record)
    for name in _DECIDING:
        said, here = record.config.get(name), versions()[name]
        if said != here and not (said is None and name == "pipeproof"):  # older ones do not say that
            raise RecordError(f"it was recorded with {name} {said or 'of no known version'}, and this is {here}")
    if case.replicas > 1:
        raise RecordError(f"it has {case.replicas} replicas, and what is expected is recorded of one pipeline")
    if why := absence(case.device):
        raise RecordError(f"it was computed on {case.device}, and {why}")
    return case
