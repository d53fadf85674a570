"""The catalogue of specimens at work: every planted fault on every schedule, and whether it was caught and named."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter

from pipeline.lower import lower
from pipeline.schedules import LOOPED, virtuals
from validation.case import Case
from validation.cause import Cause
from validation.specimens import FAMILIES, SPECIMENS
from validation.specimens.order import broken
from validation.specimens.specimen import Specimen, unchanged_order
from validation.validator import validate
from validation.world import RankFailed, World

_TIMED_OUT = re.compile(r"did not come|not finished|waiting for", re.IGNORECASE)


@dataclass(frozen=True)
class Result:
    """What became of one specimen in one case.

    ``laws`` failed: the judge's, static ones, or "deadlock" and "crash" where ranks failed. ``named`` is the kind of
    cause that the verdict named, None where it named none; ``located``: whether it named the place too.
    """

    specimen: str
    case: str
    law: str
    planted: str
    laws: tuple[str, ...]
    named: str | None
    located: bool
    seconds: float

    @property
    def caught(self) -> bool:
        """Whether the law that must fail did."""
        return self.law in self.laws

    @property
    def right(self) -> bool:
        """Whether the cause was named as it was planted."""
        return self.named == self.planted

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {**asdict(self), "caught": self.caught}


def case_for(specimen: Specimen, schedule: str, *, ranks: int = 4, microbatches: int = 8) -> Case:
    """The case on ``schedule`` that has what ``specimen`` needs, where a schedule can have it at all."""
    needs = specimen.needs
    virtual = virtuals(schedule, looped=2 if schedule in LOOPED else 1)
    model = needs.models[0] if needs.models else "gpt"
    return Case(
        schedule,
        ranks,
        virtual,
        microbatches,
        (needs.layers,) * (ranks * virtual),
        model=model,
        loss=needs.loss or "mean",
        ragged=needs.ragged,
        unequal=needs.unequal,
        plan=needs.plan,
        specimen=specimen.name,
    )


def smallest_of(specimen: Specimen) -> Case:
    """The smallest case that shows ``specimen``, with it planted."""
    return Case.parse(f"{specimen.smallest} specimen={specimen.name}")


def try_out(case: Case, world: World) -> Result:
    """Run a case with a planted fault, unless a static law refuses it before any rank starts."""
    specimen, began = SPECIMENS[case.specimen], perf_counter()
    laws, named = _outcome(specimen, case, world)
    planted = specimen.cause(case)
    return Result(
        specimen.name,
        str(case),
        specimen.law,
        planted.kind,
        laws,
        None if named is None else named.kind,
        named is not None and located(planted, named),
        perf_counter() - began,
    )


def _outcome(specimen: Specimen, case: Case, world: World) -> tuple[tuple[str, ...], Cause | None]:
    if specimen.reorder is not unchanged_order:
        return broken(specimen.reorder(lower(case.built))), None
    try:
        verdict = validate(case, world)
    except RankFailed as failure:
        return ("deadlock" if _TIMED_OUT.search(str(failure)) else "crash",), None
    cause = verdict.cause if isinstance(verdict.cause, Cause) else None
    return tuple(law.name for law in verdict.laws if law.outcome == "fail"), cause


def located(planted: Cause, named: Cause) -> bool:
    """Whether ``named`` says of place all that ``planted`` asks for."""
    fields = ("rank", "stage", "microbatches", "parameter")
    return all(getattr(planted, field) in (None, (), getattr(named, field)) for field in fields)


def plan_of(names: Iterable[str], schedules: Iterable[str]) -> tuple[list[Case], dict[tuple[str, str], str]]:
    """The cases to run, by schedule; and for each (specimen, schedule) that cannot show it, why."""
    wanted = list(names)
    cases, left_out = [], {}
    for schedule in schedules:
        for name in wanted:
            case = case_for(SPECIMENS[name], schedule)
            why = SPECIMENS[name].missing(case)
            if why:
                left_out[name, schedule] = why
            else:
                cases.append(case)
    return cases, left_out


def confusion(pairs: Iterable[tuple[str, str | None]]) -> str:
    """A line for each planted kind: how often each kind was named for it; the right one first, ``-`` for none."""
    table: dict[str, Counter[str]] = {}
    for planted, named in pairs:
        table.setdefault(planted, Counter())[named or "-"] += 1
    width = max(map(len, table), default=0)
    return "\n".join(
        f"{planted:<{width}}  {', '.join(_counts(planted, named))}" for planted, named in sorted(table.items())
    )


def _counts(planted: str, named: Counter[str]) -> Iterator[str]:
    for kind, count in sorted(named.items(), key=lambda item: (item[0] != planted, -item[1], item[0])):
        yield f"{kind} {count}"


def listing() -> str:
    """One line for each specimen: name, family and classes, kind of cause, smallest case, summary, origin."""
    rows = [
        (
            specimen.name,
            f"{family.__name__.rpartition('.')[2]} {','.join(specimen.classes)}",
            specimen.fault.kind,
            specimen.smallest,
            f"{specimen.summary} ({specimen.origin})",
        )
        for family in FAMILIES
        for specimen in family.SPECIMENS
    ]
    return "\n".join(_aligned(rows))


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]) - 1)]
    for *cells, rest in rows:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), rest])
