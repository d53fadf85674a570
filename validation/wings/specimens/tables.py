"""Tables of specimens: a line for each known or tried one, and a count of planted and named kinds."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median

from pipeproof.pipeline.transports import everyday, transport_of
from pipeproof.reports.columns import Column, row, table
from pipeproof.wings.specimens.catalogue import CATALOGUE, IN_SIMULATION, ON_DEVICES, SPECIMENS
from pipeproof.wings.specimens.mixed import MIXED, MixedFault
from pipeproof.wings.specimens.specimen import Specimen
from pipeproof.wings.specimens.trial import Named, Trial

COLUMNS = (
    Column("specimen", 30),
    Column("schedule", 12, drop=4),
    Column("planted", 20, drop=2),
    Column("caught by", 18, drop=5),
    Column("named", 20),
    Column("place", 5, drop=3),
    Column("from gradients", 20, drop=6),
    Column("time", 7, right=True, drop=7),
)
IN_SIMULATION_COLUMNS = (
    Column("specimen", 30),
    Column("schedule", 12, drop=4),
    Column("planted", 22, drop=2),
    Column("named", 22),
    Column("place", 5, drop=3),
    Column("transport", 10, drop=1),
    Column("seed", 4, right=True, drop=6),
    Column("time", 7, right=True, drop=7),
)


def line(trial: Trial, width: int | None = None, *, columns: Sequence[Column] = COLUMNS) -> str:
    """Format one line of the table with these columns."""
    found = trial.recorded
    cells = {
        "specimen": trial.specimen,
        "schedule": trial.case.partition(" ")[0],
        "planted": trial.planted,
        "caught by": trial.law if trial.caught else f"NOT: {', '.join(trial.laws) or 'nothing'}",
        "named": _kind(found),
        "place": "-" if found is None or found.kind is None else "right" if found.located else "wrong",
        "from gradients": _kind(trial.final),
        "transport": "-" if trial.transport is None else everyday(transport_of(trial.transport)),
        "seed": f"{trial.seed}",
        "time": f"{trial.seconds:.1f} s",
    }
    return row(columns, [cells[column.name] for column in columns], width)


def _kind(one: Named | None) -> str:
    if one is None:
        return "-"
    return "unknown" if one.kind is None else one.kind if one.right else f"NOT: {one.kind}"


_LISTED = (
    Column(""),
    Column("", drop=3),
    Column("", drop=2),
    Column("", drop=4),
    Column("", drop=1),
)


def listing(names: Collection[str], *, width: int | None = None) -> str:
    """List each specimen in a line: name, family and classes, kind of cause, smallest case, summary, origin."""
    own = CATALOGUE.own
    every: list[Specimen | MixedFault] = [one for one in SPECIMENS.values() if one not in own]
    every += [*MIXED.values(), *ON_DEVICES.values(), *IN_SIMULATION.values(), *own]
    rows = [
        (
            one.name,
            f"{one.family} {','.join(one.classes)}".rstrip(),
            one.fault.kind,
            one.smallest,
            f"{one.summary} ({one.origin})",
        )
        for one in every
        if one.name in names
    ]
    return table(_LISTED, rows, width)


_NAMED = (
    Column("planted"),
    Column("right", right=True, drop=1),
    Column("unknown", right=True, drop=2),
    Column("named otherwise"),
)


def confusion(pairs: Iterable[tuple[str, str | None]], width: int | None = None) -> str:
    """A row for each planted kind: how often it was named right, not named, and named as another kind."""
    rows: dict[str, Counter[str]] = {}
    for planted, kind in pairs:
        rows.setdefault(planted, Counter())[kind or ""] += 1
    cells = []
    for planted, found in sorted(rows.items()):
        others = ", ".join(f"{kind} {count}" for kind, count in sorted(found.items()) if kind not in ("", planted))
        cells.append([planted, str(found[planted]), str(found[""]), others])
    return table(_NAMED, cells, width) if cells else ""


def totals(trials: Sequence[Trial], which: str) -> str:
    """Count caught, correctly named, located, unknown, wrong, and time; ``which``: "recorded" or "final"."""
    found = [one for trial in trials if (one := getattr(trial, which)) is not None]
    text = f"{len(trials)} tried: {sum(trial.caught for trial in trials)} caught; {counts(found)}"
    took = [one.seconds for one in found if one.seconds]
    return f"{text}; a diagnosis took {median(took):.2f} s, at most {max(took):.2f} s" if took else text


def counts(found: Sequence[Named]) -> str:
    """Of those diagnosed: named right, located, unknown and wrong, with shares."""
    numbers: Mapping[str, int] = {
        "named right": sum(one.right for one in found),
        "located too": sum(one.located for one in found),
        "unknown": sum(one.kind is None for one in found),
        "wrong": sum(one.wrong for one in found),
    }
    shares = (f" ({100 * count / len(found):.1f} %)" if found else "" for count in numbers.values())
    parts = (f"{count} {what}{share}" for (what, count), share in zip(numbers.items(), shares, strict=True))
    return f"of {len(found)} diagnosed {', '.join(parts)}"


def pairs_of(trials: Iterable[Trial], which: str) -> Iterator[tuple[str, str | None]]:
    """Yield planted and named kinds for every diagnosed trial; acceptable kinds count as right."""
    for trial in trials:
        one: Named | None = getattr(trial, which)
        if one is not None:
            yield trial.planted, trial.planted if one.right else one.kind
