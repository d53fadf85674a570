"""Rows of the bench: medians, ratios, and whether a ratio meets its target."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class Target:
    """A ratio and the most that it should be, or the least where ``least`` is set."""

    name: str
    value: float
    bound: float
    least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.least else self.value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.least else "<="
        return f"{self.name} {self.value:.3f} ({'pass' if self.met else 'MISS'}: {sign} {self.bound:g})"


@dataclass(frozen=True)
class Row:
    """One line of a part: medians by variant, in the unit that the part's heading names."""

    name: str
    medians: dict[str, float]
    targets: list[Target] = field(default_factory=list)
    note: str = ""

    def as_json(self) -> dict[str, object]:
        """The row as plain data."""
        met = [target.met for target in self.targets]
        return dataclasses.asdict(self) | {"met": met}


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the rounds' own ratios: both sides of each were measured within a second of each other."""
    return median(a / b for a, b in zip(over, under, strict=True))


def table(rows: Sequence[Row]) -> str:
    """Aligned columns: name, medians, targets, note."""
    columns = list(dict.fromkeys(column for row in rows for column in row.medians))
    lines = [["", *columns, "targets", ""]]
    for row in rows:
        cells = [f"{row.medians[column]:.2f}" if column in row.medians else "-" for column in columns]
        lines.append([row.name, *cells, "  ".join(map(str, row.targets)), row.note])
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    return "\n".join(_align(line, widths, len(columns)).rstrip() for line in lines)


def _align(line: Sequence[str], widths: Sequence[int], numbers: int) -> str:
    """``line`` with its first cell and those after the ``numbers`` next ones set left, those between set right."""
    cells = zip(line, widths, strict=True)
    return "  ".join(cell.rjust(w) if 1 <= k <= numbers else cell.ljust(w) for k, (cell, w) in enumerate(cells))
