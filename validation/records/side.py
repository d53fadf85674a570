"""A record, judged by what its own config asks for: that is computed once more, on one device."""

from dataclasses import dataclass, replace

from pipeproof.core.measured import versions
from pipeproof.core.verdict import Crash, Verdict
from pipeproof.own.case import Case
from pipeproof.records.case_record import expected_record, own_case
from pipeproof.records.compare import compare
from pipeproof.records.record import Record, RecordError
from pipeproof.worlds.accelerator import absence

_DECIDING = ("torch", "pipeproof")  # versions without which another answer may be due
_EXPECTED = "expected.safetensors"


@dataclass(frozen=True)
class Side:
    """One of two records, judged by what its own config asks for.

    due: that, None where it is not computed; then ``lacks`` says why. line: the case of it.
    """

    due: Record | None = None
    verdict: Verdict | None = None
    lacks: str = ""
    line: str = ""

    @property
    def outcome(self) -> str:
        """``pass``, ``fail``, ``unknown``, or ``not computed``."""
        return "not computed" if self.verdict is None else self.verdict.verdict

    def __str__(self) -> str:
        """What was found of it, in a few words."""
        if self.verdict is None:
            return f"not judged: {self.lacks}"
        if self.verdict.verdict == "pass":
            compared = sum(law.checked for law in self.verdict.laws)
            return f"right by its own config: {compared} comparisons, {self.verdict.tier}"
        if self.verdict.verdict == "unknown":
            return f"not decided by its own config: {self.verdict.reason}"
        told, (first, *_) = self.verdict.reason, self.verdict.mismatches
        return f"wrong by its own config: {told}" + (
            "" if self.verdict.cause else f"; first {first.law}, {first.where}"
        )

    def next(self, file: str) -> list[str]:
        """What to type to have all that is known of it."""
        if self.outcome not in ("fail", "unknown"):
            return []
        return [f"pipeproof record {self.line} --out {_EXPECTED}", f"pipeproof compare {_EXPECTED} {file}"]


def side_of(record: Record) -> Side:
    """``record``, judged by what its own config asks for, without the fault that it may say was planted."""
    try:
        case = replace(_computed(record), specimen="")
    except RecordError as error:
        return Side(lacks=str(error))
    try:
        due = expected_record(case)
        return Side(due, compare(due, record), line=str(case))
    except Exception as error:  # no one type: memory may not suffice, and who knows what wrote it
        return Side(lacks=f"it could not be: {Crash.of(error).said}", line=str(case))


def _computed(record: Record) -> Case:
    """The case of ``record``, where what it asks for can be computed here. Raises ``RecordError`` elsewhere."""
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
