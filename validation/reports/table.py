"""Tables of what commands found: a line per verdict, and of planted faults how often each was named what."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from pipeproof.cases.case import Case
from pipeproof.cases.trial import Named, Trial
from pipeproof.judging.verdict import Verdict, small
from pipeproof.reports.columns import Column, Layout

COLUMNS = (
    Column("schedule", 12, least=8, gap=0),
    Column("model", 8, drop=3),
    Column("dtype", 5, drop=10),
    Column("P", 2, right=True, drop=4),
    Column("V", 2, right=True, drop=8),
    Column("M", 3, right=True, drop=5),
    Column("split", 15, drop=9, gap=2),
    Column("losses", 6, right=True, drop=7),
    Column("params", 6, right=True, drop=6),
    Column("tier", 7, drop=2, gap=2),
    Column("worst err", 9, right=True, drop=1),
    Column("floor", 7, right=True, drop=12),
    Column("norm err", 8, right=True, drop=13),
    Column("verdict", 7, gap=2),
    Column("time", 6, right=True, drop=11),
)
HEADER = Layout.of(COLUMNS, None).header


def line(case: Case, verdict: Verdict, width: int | None = None) -> str:
    """One line of the table of ``COLUMNS``, fit for so many columns of a terminal.

    losses and params are how many were compared over the whole plan; worst err and norm err are relative, 0 where
    every bit agreed; floor is what rounding alone does to the worst gradient, or, where all bits agree, to any.
    """
    numbers = ["-"] * 5
    if verdict.laws:
        losses, gradients, norm = (verdict.law(name) for name in ("loss", "gradient", "grad-norm"))
        floor = gradients.floor if gradients.worst else verdict.floor
        numbers = [str(losses.checked), str(gradients.checked), *map(small, (gradients.worst, floor, norm.worst))]
    n_losses, n_gradients, worst, floor_, norm_ = numbers
    sizes = (case.ranks, case.virtual, case.microbatches)
    cells = [case.built.name, case.model, case.dtype, *map(str, sizes), ",".join(map(str, case.split)), n_losses]
    cells += [n_gradients, verdict.tier, worst, floor_, norm_, verdict.word, f"{verdict.seconds:.1f} s"]
    return Layout.of(COLUMNS, width).row(cells)


def summary(verdicts: Sequence[Verdict], *, left_out: int = 0) -> str:
    """The last line of a table; ``left_out`` schedules were asked for and not run."""
    words = ("pass", "fail", "unknown", "error", "hang")
    counts = {word: sum(v.word == word for v in verdicts) for word in words}
    bitwise = sum(v.tier == "bitwise" for v in verdicts)
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count or outcome == "pass")
    missing = f"; {left_out} left out" if left_out else ""
    return f"{said}; {bitwise} of {len(verdicts)} bit for bit{missing}"


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
