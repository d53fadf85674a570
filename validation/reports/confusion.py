"""Planted against named: the confusion matrix of many trials, and how many of them a diagnosis got right."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from validation.cases.trial import Named, Trial

UNKNOWN = "-"


def matrix(pairs: Iterable[tuple[str, str | None]]) -> str:
    """A row for each planted kind and a column for each named one, numbered; what was named right is the diagonal."""
    table: dict[str, Counter[str]] = {}
    for planted, kind in pairs:
        table.setdefault(planted, Counter())[kind or UNKNOWN] += 1
    if not table:
        return ""
    rows = sorted(table)
    others = sorted({kind for counts in table.values() for kind in counts} - set(rows) - {UNKNOWN})
    columns = [*rows, *others, UNKNOWN]
    width = max(len(kind) for kind in columns) + 4
    head = f"{'planted':<{width}}" + "".join(f"{number:>4}" for number in range(1, len(columns))) + f"{'?':>4}"
    lines = [head]
    for number, planted in enumerate(rows, start=1):
        cells = "".join(f"{table[planted][kind] or '.':>4}" for kind in columns)
        lines.append(f"{number:>2} {planted:<{width - 3}}{cells}")
    lines += [f"{number:>2} {kind} (named, never planted)" for number, kind in enumerate(others, start=len(rows) + 1)]
    return "\n".join(lines)


def totals(trials: Sequence[Trial], which: str) -> str:
    """Caught, named right, located, unknown, wrong, and what a diagnosis took; ``which`` is "recorded" or "final"."""
    found = [one for trial in trials if (one := getattr(trial, which)) is not None]
    caught = sum(trial.caught for trial in trials)
    text = f"{len(trials)} tried: {caught} caught; {counts(found)}"
    if any(one.seconds for one in found):
        took = [one.seconds for one in found if one.seconds]
        text += f"; a diagnosis took {median(took):.2f} s, at most {max(took):.2f} s"
    return text


def counts(found: Sequence[Named]) -> str:
    """Of those diagnosed: named right, located, unknown and wrong, with shares."""
    numbers: Mapping[str, int] = {
        "named right": sum(one.right for one in found),
        "located too": sum(one.located for one in found),
        "unknown": sum(one.kind is None for one in found),
        "wrong": sum(one.wrong for one in found),
    }
    shares = ", ".join(f"{count} {what}{_share(count, len(found))}" for what, count in numbers.items())
    return f"of {len(found)} diagnosed {shares}"


def pairs_of(trials: Iterable[Trial], which: str) -> Iterator[tuple[str, str | None]]:
    """The planted kind and the named one of every trial that was diagnosed so; one that will do counts as right."""
    for trial in trials:
        one: Named | None = getattr(trial, which)
        if one is not None:
            yield trial.planted, trial.planted if one.right else one.kind


def _share(count: int, of: int) -> str:
    return f" ({100 * count / of:.1f} %)" if of else ""
