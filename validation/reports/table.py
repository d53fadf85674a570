"""Tables for commands: a line per verdict, and the ranks' time."""

from collections.abc import Sequence

from pipeproof.core.verdict import Verdict, small
from pipeproof.own.case import Case
from pipeproof.pipeline.trace import Profile
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
    """Format one line under ``COLUMNS``, for a terminal of ``width`` columns.

    losses and params count comparisons over the whole plan; worst err and norm err are relative, 0 if every bit agreed;
    floor is the rounding of the worst gradient, or, if all bits agree, of any.
    """
    sizes = (case.ranks, case.virtual, case.microbatches)
    cells = [case.built.name, case.model, case.dtype, *map(str, sizes), ",".join(map(str, case.split))]
    return row(COLUMNS, [*cells, *count_compared(verdict, "loss", "gradient"), *outcome(verdict)], width)


def count_compared(verdict: Verdict, *laws: str) -> list[str]:
    """Count comparisons for each of ``laws``; a dash for a step without a comparison."""
    checked = {law.name: str(law.checked) for law in verdict.laws}
    return [checked.get(name, "-") for name in laws]


def outcome(verdict: Verdict) -> list[str]:
    """Common last cells of tables: tier, worst error, floor, norm error, verdict, time."""
    found = {law.name: law for law in verdict.laws}
    errors = ["-"] * 3
    if gradient := found.get("gradient"):
        errors[:2] = small(gradient.worst), small(gradient.floor if gradient.worst else verdict.floor)
    if norm := found.get("grad-norm"):
        errors[2] = small(norm.worst)
    return [verdict.tier, *errors, verdict.word, f"{verdict.seconds:.1f} s"]


def summary(verdicts: Sequence[Verdict], *, left_out: int = 0) -> str:
    """The last line of a table; ``left_out``: the number of schedules that did not run."""
    words = ("pass", "fail", "unknown", "error", "hang")
    counts = {word: sum(v.word == word for v in verdicts) for word in words}
    bitwise = sum(v.tier == "bitwise" for v in verdicts)
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count or outcome == "pass")
    missing = f"; {left_out} left out" if left_out else ""
    return f"{said}; {bitwise} of {len(verdicts)} bit for bit{missing}"


_RANK = Column("rank", right=True)


def profile_table(profiles: Sequence[Profile], width: int | None = None) -> str:
    """Format a line per rank: milliseconds, and the share of the step."""
    columns = [_RANK, *_spent("step"), Column("other", right=True, drop=4)]
    return table(columns, [[str(one.rank), *_times(one)] for one in profiles], width)


def table_of_times(measured: Sequence[Profile], simulated: Sequence[Profile], width: int | None = None) -> str:
    """Format two lines per rank: measured times, and simulated ones."""
    rows = []
    for one, other in zip(measured, simulated, strict=True):
        rows += [[str(one.rank), "measured", *_times(one)[:-1]], ["", "simulated", *_times(other)[:-1]]]
    return table([_RANK, Column(""), *_spent("makespan")], rows, width)


def _spent(whole: str) -> list[Column]:
    """Columns of a step's times; idle time stays."""
    drops = {whole: 2, "compute": 1, "communication": 3, "idle": 0}
    return [Column(name, right=True, drop=drop) for name, drop in drops.items()]


def _times(profile: Profile) -> list[str]:
    parts = (profile.compute_s, profile.communication_s, profile.idle_s, profile.other_s)
    shares = (f"{1e3 * part:.1f} ms {part / profile.step_s if profile.step_s else 0.0:6.1%}" for part in parts)
    return [f"{1e3 * profile.step_s:.1f} ms", *shares]
