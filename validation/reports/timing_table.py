"""What a bench says: how long each config took, beside the first."""

from collections.abc import Iterator, Sequence

from pipeproof.own.timings import FEWEST, Timing
from pipeproof.reports.columns import Column, table

_COLUMNS = (
    Column("config"),
    Column("ranks", right=True, drop=2),
    Column("step", right=True),
    Column("spread", right=True, drop=3),
    Column("ratio", right=True),
    Column("memory", right=True, drop=1),
    Column("runs", drop=4),
)


def compare_medians(first: Timing, other: Timing) -> Iterator[str]:
    """How the other compares, in words."""
    ratio = other.ratio_to(first)
    each = f"{min(ratio.rounds):.2f} to {max(ratio.rounds):.2f} in single rounds"
    if len(first.rounds) < FEWEST:
        yield f"{other.name} and {first.name}: too few rounds to compare"
    elif ratio.noise:
        known = f"no difference from {first.name} beyond noise"
        yield f"{other.name}: {known}: ratio {ratio.value:.2f}, {each}"
    else:
        yield f"{other.name} takes {ratio.value:.2f} times as long as {first.name}, {each}"
    if first.work != other.work:
        yield f"{other.name} has other work: {other.work}; {first.name}: {first.work}"


def timing_table(timings: Sequence[Timing], width: int | None) -> str:
    """A line for each; ratios are to the first."""
    rows = [
        (
            one.name,
            str(len(one.bytes)),
            f"{one.seconds * 1e3:.2f} ms",
            f"{one.spread:.0%}",
            f"{one.ratio_to(timings[0]).value:.2f}",
            f"{max(one.bytes, default=0) / 2**20:.2f} MiB",
            one.runs,
        )
        for one in timings
    ]
    return table(_COLUMNS, rows, width)


def as_data(one: Timing, first: Timing) -> dict[str, object]:
    """All of it as JSON has it."""
    data = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(one).items()}
    if not one.rounds:
        return data | dict.fromkeys(("seconds", "spread", "ratio", "noise"))
    ratio = one.ratio_to(first)
    return data | {"seconds": one.seconds, "spread": one.spread, "ratio": ratio.value, "noise": ratio.noise}
