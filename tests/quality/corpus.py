"""What became of each row of the truth test, as values, and how it differs from what became of it before."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from truth_check import Checked

from pipeproof.core.verdict import Verdict

BASELINE = Path(__file__).with_name("baseline.jsonl")
OWN = ("specimens", "cases", "fuzz")  # parts that run our own runtime beside the whole reference
_GOOD = ("right", "silent")

Outcome = Literal["pass", "fail", "unknown", "raised"]
Named = tuple[str, int | None, int | None, tuple[int, ...], str | None]  # kind, rank, stage, microbatches, parameter
Place = tuple[int | None, int | None, int | None, str | None]  # rank, stage, microbatch, parameter


@dataclass(frozen=True)
class Values:
    """What became of a row.

    faulty: it has a fault. naming: how the fault was named, as ``truth_check`` has it. bitwise: every comparison was.
    failed, undecided: laws that fail, and that are unknown. place: of the first mismatch. false: how many sentences
    are. why: what the verdict says where it is no pass, for readers alone: wording is not compared.
    """

    row: str
    faulty: bool
    outcome: Outcome
    naming: str
    bitwise: bool = False
    failed: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    causes: tuple[Named, ...] = ()
    place: Place | None = None
    false: int = 0
    why: str = ""

    @property
    def part(self) -> str:
        return self.row.partition(" | ")[0]

    @property
    def watched(self) -> bool:
        return self.row.split(" | ")[1] == "watched"

    @property
    def title(self) -> str:
        return self.row.split(" | ", 2)[2]

    @property
    def caught(self) -> bool:
        """Whether a user is told of it: nothing but a pass is silent."""
        return self.outcome != "pass"

    @classmethod
    def of(cls, row: str, *, faulty: bool, verdict: Verdict, checked: Checked) -> "Values":
        """``verdict`` and how it was ``checked``."""
        causes = tuple((one.kind, one.rank, one.stage, one.microbatches, one.parameter) for one in verdict.causes)
        first = next(iter(verdict.mismatches), None)
        place = None if first is None else (first.rank, first.stage, first.microbatch, first.parameter)
        return cls(
            row,
            faulty,
            verdict.outcome,
            checked.naming,
            bitwise=verdict.tier == "bitwise",
            failed=_laws(verdict, "fail"),
            undecided=_laws(verdict, "unknown"),
            causes=causes,
            place=place,
            false=len(checked.false),
            why="" if verdict.outcome == "pass" else verdict.reason[:160],
        )

    def line(self) -> str:
        """As a line of JSON, without what is as by default."""
        plain = {one.name: one.default for one in fields(self)}
        return json.dumps({name: value for name, value in asdict(self).items() if value != plain[name]})

    @classmethod
    def parse(cls, line: str) -> "Values":
        """What ``line`` made."""
        given: dict[str, Any] = json.loads(line)
        for name in ("failed", "undecided", "place"):
            if name in given:
                given[name] = tuple(given[name])
        causes = [(kind, rank, stage, tuple(of), name) for kind, rank, stage, of, name in given.get("causes", ())]
        return cls(**{**given, "causes": tuple(causes)})


def _laws(verdict: Verdict, outcome: str) -> tuple[str, ...]:
    return tuple(law.name for law in verdict.laws if law.outcome == outcome)


def read(path: Path) -> dict[str, Values]:
    """What a file has, by row; of a row that is there twice, the last."""
    lines = path.read_text().splitlines() if path.exists() else ()
    return {one.row: one for one in map(Values.parse, lines)}


@dataclass(frozen=True)
class Transition:
    """A row of which something else became. ``forbidden`` says by which rule it may not be so; empty: it may."""

    what: str
    before: Values
    after: Values
    forbidden: str = ""

    def __str__(self) -> str:
        mark = f"FORBIDDEN ({self.forbidden}): " if self.forbidden else ""
        why = f" ({self.after.why})" if self.after.why else ""
        before, after = (
            " ".join([one.outcome, " and ".join(kind for kind, *_ in one.causes)]).strip()
            for one in (self.before, self.after)
        )
        return f"{self.what:<16} {mark}{self.before.row}: {before} -> {after}{why}"


def transitions(before: Mapping[str, Values], after: Iterable[Values]) -> Iterator[Transition]:
    """What is otherwise in ``after`` than it was ``before``; rows that were not there before are none.

    Of the cases that ``fuzz`` draws the file has those alone that were no pass, bit for bit: all others were.
    """
    for two in after:
        plain = Values(two.row, False, "pass", "silent", bitwise=True) if two.part == "fuzz" else None
        if (one := before.get(two.row, plain)) is not None:
            yield from _of(one, two)


def _of(one: Values, two: Values) -> Iterator[Transition]:
    if one.outcome != two.outcome:
        yield Transition(f"{one.outcome} -> {two.outcome}", one, two, _forbidden(one, two))
    elif one.naming != two.naming:
        better = two.naming in _GOOD
        yield Transition("named right" if better else f"named {two.naming}", one, two)
    elif (one.causes, one.failed, one.undecided, one.place) != (two.causes, two.failed, two.undecided, two.place):
        yield Transition("other values", one, two)
    elif one.bitwise and not two.bitwise:
        own = one.part in OWN
        yield Transition("no longer bits", one, two, "our own runtime is held to bits" if own else "")
    if two.false > one.false:
        yield Transition("false sentences", one, two, "a sentence more is false")


def _forbidden(one: Values, two: Values) -> str:
    """By which rule the outcome of a row may not change so; empty where it may."""
    if one.faulty and one.caught and not two.caught:
        return "a fault that was caught passes"
    if not one.faulty and one.outcome in ("pass", "unknown") and two.outcome in ("fail", "raised"):
        return "a right row fails"
    if one.part in OWN and two.outcome == "unknown":
        return "of our own runtime nothing becomes unknown"
    return ""


def summary(found: Sequence[Transition], rows: int) -> str:
    """How many transitions there are of each kind."""
    counts: dict[str, int] = {}
    for one in found:
        what = f"{one.what}{', forbidden' if one.forbidden else ''}"
        counts[what] = counts.get(what, 0) + 1
    changed = ", ".join(f"{what}: {count}" for what, count in sorted(counts.items()))
    return f"{rows} rows beside those of the baseline; {changed or 'no transition'}"
