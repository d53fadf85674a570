"""Tables of what commands found: a line per verdict, and of planted faults how often each was named what."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from pipeproof.cases.case import Case
from pipeproof.cases.trial import Named, Trial
from pipeproof.core.verdict import Verdict, small
from pipeproof.pipeline.profile import Profile
from pipeproof.reports.columns import Column, row, table

OUTCOME = (  # of ``outcome``
    Column("tier", 7, drop=2),
    Column("worst err", 9, right=True, drop=1),
    Column("floor", 7, right=True, drop=12),
    Column("norm err", 8, right=True, drop=13),
    Column("verdict", 7),
    Column("time", 6, right=True, drop=11),
)
COLUMNS = (
    Column("schedule", 12),
    Column("model", 8, drop=3),
    Column("dtype", 5, drop=10),
    Column("P", 2, right=True, drop=4),
    Column("V", 2, right=True, drop=8),
    Column("M", 3, right=True, drop=5),
    Column("split", 15, drop=9),
    Column("losses", 6, right=True, drop=7),
    Column("params", 6, right=True, drop=6),
    *OUTCOME,
)


def line(case: Case, verdict: Verdict, width: int | None = None) -> str:
    """One line of the table of ``COLUMNS``, fit for so many columns of a terminal.

    losses and params are how many were compared over the whole plan; worst err and norm err are relative, 0 where
    every bit agreed; floor is what rounding alone does to the worst gradient, or, where all bits agree, to any.
    """
    sizes = (case.ranks, case.virtual, case.microbatches)
    cells = [case.built.name, case.model, case.dtype, *map(str, sizes), ",".join(map(str, case.split))]
    return row(COLUMNS, [*cells, *compared(verdict, "loss", "gradient"), *outcome(verdict)], width)


def compared(verdict: Verdict, *laws: str) -> list[str]:
    """How many things were compared for each of ``laws``; a step that cannot be compared has none of them."""
    checked = {law.name: str(law.checked) for law in verdict.laws}
    return [checked.get(name, "-") for name in laws]


def outcome(verdict: Verdict) -> list[str]:
    """The cells that every table ends with: tier, worst error, floor, error of the norm, verdict, time."""
    found = {law.name: law for law in verdict.laws}
    errors = ["-"] * 3
    if gradient := found.get("gradient"):
        errors[:2] = small(gradient.worst), small(gradient.floor if gradient.worst else verdict.floor)
    if norm := found.get("grad-norm"):
        errors[2] = small(norm.worst)
    return [verdict.tier, *errors, verdict.word, f"{verdict.seconds:.1f} s"]


def summary(verdicts: Sequence[Verdict], *, left_out: int = 0) -> str:
    """The last line of a table; ``left_out`` schedules were asked for and not run."""
    words = ("pass", "fail", "unknown", "error", "hang")
    counts = {word: sum(v.word == word for v in verdicts) for word in words}
    bitwise = sum(v.tier == "bitwise" for v in verdicts)
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count or outcome == "pass")
    missing = f"; {left_out} left out" if left_out else ""
    return f"{said}; {bitwise} of {len(verdicts)} bit for bit{missing}"


def profile_table(profiles: Sequence[Profile], width: int | None = None) -> str:
    """A line per rank: milliseconds, and the share of the step."""
    return table([_RANK, *_spent("step"), _OTHER], [[str(one.rank), *_times(one)] for one in profiles], width)


def measured_table(measured: Sequence[Profile], simulated: Sequence[Profile], width: int | None = None) -> str:
    """Two lines per rank: where the time went, and where the simulator has it go."""
    rows = []
    for one, other in zip(measured, simulated, strict=True):
        rows += [[str(one.rank), "measured", *_times(one)[:-1]], ["", "simulated", *_times(other)[:-1]]]
    return table([_RANK, Column(""), *_spent("makespan")], rows, width)


_RANK = Column("rank", right=True)
_OTHER = Column("other", right=True, drop=4)


def _spent(whole: str) -> Iterator[Column]:
    """The columns of what a step took; idle time stays."""
    for name, drop in ((whole, 2), ("compute", 1), ("communication", 3), ("idle", 0)):
        yield Column(name, right=True, drop=drop)


def _times(profile: Profile) -> list[str]:
    parts = (profile.compute_s, profile.communication_s, profile.idle_s, profile.other_s)
    shares = (f"{part / profile.step_s if profile.step_s else 0.0:6.1%}" for part in parts)
    told = (f"{1e3 * part:.1f} ms {share}" for part, share in zip(parts, shares, strict=True))
    return [f"{1e3 * profile.step_s:.1f} ms", *told]


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
    """Caught, named right, located, unknown, wrong, and what a diagnosis took; ``which`` is "recorded" or "final"."""
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
    told = (f"{count} {what}{share}" for (what, count), share in zip(numbers.items(), shares, strict=True))
    return f"of {len(found)} diagnosed {', '.join(told)}"


def pairs_of(trials: Iterable[Trial], which: str) -> Iterator[tuple[str, str | None]]:
    """The planted kind and the named one of every trial that was diagnosed so; one that will do counts as right."""
    for trial in trials:
        one: Named | None = getattr(trial, which)
        if one is not None:
            yield trial.planted, trial.planted if one.right else one.kind
