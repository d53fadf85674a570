"""The catalogue of specimens at work: planted faults in their smallest cases or on whole schedules, caught and named.

Nothing here knows how a fault is found: a case with a specimen is validated like any other.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter

from pipeline.lower import lower
from pipeline.schedules import LOOPED, virtuals
from validation.campaign import Setting
from validation.case import Case
from validation.cause import Cause
from validation.specimens import CONTROLS, FAMILIES, SPECIMENS, SpecimenError
from validation.specimens.order import broken
from validation.specimens.specimen import Specimen, unchanged_order
from validation.terminal import JsonFile, Terminal
from validation.validator import validate
from validation.world import RankFailed, World

SCHEMA = "pipeproof/specimens/1"
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


def cases_on(names: Iterable[str], schedules: Iterable[str]) -> tuple[list[Case], dict[tuple[str, str], str]]:
    """The cases to run, by schedule; and for each (specimen, schedule) that cannot show the fault, why."""
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


def chosen(text: str) -> list[str]:
    """The specimens that ``text`` names, separated by commas; all for none. Raises ``SpecimenError``."""
    names = [name.strip() for name in text.split(",") if name.strip()] or list(SPECIMENS)
    for name in names:
        if name not in SPECIMENS:
            raise SpecimenError(f"unknown specimen {name!r}: pipeproof specimens --list prints all")
    return names


def try_all(names: Sequence[str], schedules: Sequence[str], setting: Setting) -> int:
    """Run specimens on schedules, or in their smallest cases where there is no schedule; returns the exit status.

    A line for each, then how often each planted kind was named what. 1 where a specimen was not caught.
    """
    cases, left_out = cases_on(names, schedules) if schedules else ([smallest_of(SPECIMENS[n]) for n in names], {})
    terminal, results = Terminal(), list[Result]()
    with JsonFile(setting.json) as file, World(device="cpu", timeout_s=setting.timeout_s) as world:
        terminal.say(HEADER)
        for number, case in enumerate(cases, start=1):
            with terminal.progress(f"{number} of {len(cases)}: {case}"):
                results.append(try_out(case, world))
            terminal.say(line(results[-1]))
        if not schedules and len(names) == len(SPECIMENS):
            terminal.say(_controls(world))
        for why, those in _grouped(left_out).items():
            terminal.say(f"left out, {why}: {', '.join(those)}")
        terminal.say(f"planted, and what it was named:\n{confusion((r.planted, r.named) for r in results)}")
        terminal.say(summary(results))
        file.write({"schema": SCHEMA, "specimens": [result.as_dict() for result in results]})
    return 0 if results and all(result.caught for result in results) else 1


def _controls(world: World) -> str:
    """A sentence on the changes that are no faults."""
    verdicts = {n: validate(Case.parse(f"{c.smallest} specimen={n}"), world).verdict for n, c in CONTROLS.items()}
    alarms = [name for name, verdict in verdicts.items() if verdict != "pass"]
    said = f"; FALSE ALARM for {', '.join(alarms)}" if alarms else ""
    return f"{len(verdicts) - len(alarms)} of {len(verdicts)} changes that are no faults pass{said}"


def _grouped(left_out: Mapping[tuple[str, str], str]) -> dict[str, list[str]]:
    """By reason: the specimens, each with its schedules."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for (name, schedule), why in left_out.items():
        by_reason.setdefault(why, {}).setdefault(name, []).append(schedule)
    return {why: [f"{n} on {' '.join(where)}" for n, where in those.items()] for why, those in by_reason.items()}


HEADER = f"{'specimen':<28} {'schedule':<12} {'planted':<20} {'caught by':<18} {'named':<20} {'place':<5} {'time':>7}"


def line(result: Result) -> str:
    """One line of the table under ``HEADER``."""
    caught = result.law if result.caught else f"NOT: {', '.join(result.laws) or 'nothing'}"
    place = "-" if result.named is None else "right" if result.located else "wrong"
    schedule = result.case.partition(" ")[0]
    return (
        f"{result.specimen:<28} {schedule:<12} {result.planted:<20} {caught:<18} {result.named or '-':<20} {place:<5} "
        f"{result.seconds:>5.1f} s"
    )


def summary(results: Collection[Result]) -> str:
    """How many were caught, named right and located."""
    caught, right, placed = (sum(getattr(r, what) for r in results) for what in ("caught", "right", "located"))
    named = sum(result.named is not None for result in results)
    wrong = named - right
    return (
        f"{len(results)} tried: {caught} caught, {right} named right, {wrong} named wrong, {placed} located; "
        f"{sum(result.seconds for result in results):.1f} s"
    )


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


def listing(names: Collection[str] = SPECIMENS) -> str:
    """One line for each of these specimens: name, family and classes, kind of cause, smallest case, summary, origin."""
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
        if specimen.name in names
    ]
    return "\n".join(_aligned(rows))


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]) - 1)]
    for *cells, rest in rows:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), rest])
