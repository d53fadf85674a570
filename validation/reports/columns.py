"""Tables and grids as wide as a terminal: what matters least is left out or shortened, or rows take several lines.

A width of None is that of a file or a pipe, where all is written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from textwrap import fill

from pipeproof.pipeline.sizes import shortened

ROWS = 60  # or columns, of a table in a page: the others are counted; GitHub shows no more than 1 MiB
_NARROW = 8  # letters in which most words can still be told apart


@dataclass(frozen=True)
class Column:
    """A column: its name, how wide it is, and how wide at least (0: as wide as it is).

    ``drop``: columns are left out by this number, the largest first; those of 0 stay. ``gap`` is what stands before it.
    ``fold``: of a row that takes several lines, one best begins here.
    """

    name: str
    width: int = 0
    right: bool = False
    drop: int = 0
    least: int = 0
    gap: int = 1
    fold: bool = False

    @property
    def needed(self) -> int:
        """What it takes at least, with its gap."""
        return (self.least or self.width) + self.gap


@dataclass(frozen=True)
class Layout:
    """The columns of a table that fit, and which of all they are."""

    columns: tuple[Column, ...]
    kept: tuple[int, ...]
    width: int | None = None

    @classmethod
    def of(cls, columns: Sequence[Column], width: int | None) -> "Layout":
        """As many of ``columns`` as there is room for, some of them narrower."""
        kept = dict(enumerate(columns))
        if width is None:
            return cls(tuple(columns), tuple(kept))
        for k in sorted(kept, key=lambda k: -columns[k].drop):
            if columns[k].drop and sum(column.needed for column in kept.values()) > width:
                del kept[k]
        first, *others = kept
        cuts = [(k, kept[k].least or kept[k].width) for k in reversed(kept)]
        # Narrower than anybody thought of: the first column says least about numbers.
        cuts += [(k, least) for least in (_NARROW, 1) for k in (first, *reversed(others))]
        for k, least in cuts:
            over = max(0, sum(column.width + column.gap for column in kept.values()) - width)
            kept[k] = replace(kept[k], width=max(min(kept[k].width, least), kept[k].width - over))
        return cls(tuple(kept.values()), tuple(kept), width)

    @property
    def header(self) -> str:
        """The names."""
        return self._line([column.name for column in self.columns])

    def row(self, cells: Sequence[str]) -> str:
        """A line; ``cells`` are those of all columns."""
        return self._line([cells[k] for k in self.kept])

    def _line(self, cells: Sequence[str]) -> str:
        """Where a cell is longer than its column, as in a file, what follows is moved."""
        line = ""
        for column, cell in zip(self.columns, cells, strict=True):
            text = cell if self.width is None else shortened(cell, column.width)
            line += " " * column.gap + (text.rjust(column.width) if column.right else text.ljust(column.width))
        return line.rstrip()


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """A table whose columns are as wide as what is in them.

    A column with nothing in it is left out, and so is the header where no column has a name.
    """
    used, cells = _filled(columns, rows)
    layout = Layout.of(used, width)
    header = [layout.header] if any(column.name for column in columns) else []
    return "\n".join([*header, *map(layout.row, cells)])


def folded(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """As ``table``, but what a line has no room for goes to the next: no column is left out.

    Text is cut only where it is wider than a line.
    """
    used, cells = _filled(columns, rows)
    pieces = list(_folds(used, width))
    layouts = [Layout.of(_set_in(used, piece), width) for piece in pieces]
    lines = [layout.header for layout in layouts]
    for row in cells:
        lines += [line for piece, layout in zip(pieces, layouts, strict=True) if (line := layout.row(row[piece]))]
    return "\n".join(lines)


_INDENT = 2  # of the lines of a row behind its first


def _filled(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> tuple[list[Column], list[list[str]]]:
    """The columns with anything in them, as wide as that is, and their cells."""
    there = [k for k in range(len(columns)) if k == 0 or any(row[k] for row in rows)]
    cells = [[row[k] for k in there] for row in rows]
    widest = [max(map(len, [columns[k].name, *(row[k] for row in rows)])) for k in there]
    sized = zip((columns[k] for k in there), widest, strict=True)
    return [replace(column, width=most, least=min(column.least, most)) for column, most in sized], cells


def _folds(columns: Sequence[Column], width: int | None) -> Iterator[slice]:
    """Which columns stand on one line: those between two folds, and more of them where there is room."""
    first, taken = 0, 0
    ends = [k for k, column in enumerate(columns) if column.fold] + [len(columns)]
    for k, column in enumerate(columns):
        end = next(end for end in ends if end > k) if k == 0 or column.fold else k + 1
        together = sum(one.gap + one.width for one in columns[k:end])
        if width is not None and k > first and taken + together > width:
            yield slice(first, k)
            first, taken = k, _INDENT - column.gap
        taken += column.gap + column.width
    yield slice(first, len(columns))


def _set_in(columns: Sequence[Column], piece: slice) -> list[Column]:
    """The columns of one line, of which all stay."""
    first, *others = (replace(column, drop=0) for column in columns[piece])
    return [replace(first, gap=_INDENT) if piece.start else first, *others]


def wrapped(text: str, width: int | None, *, indent: int) -> str:
    """``text`` in lines between words; all but the first are set in."""
    if width is None or width <= 2 * indent:
        return text
    return fill(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def in_pieces(grid: str, width: int | None) -> str:
    """A grid of rows ``rank 0 | cells``, all cells of one width, in pieces one below the other; each says its start."""
    rows = [line.partition(" | ") for line in grid.splitlines()]
    if width is None or not all(bar for _, bar, _ in rows) or max(map(len, grid.splitlines()), default=0) <= width:
        return grid
    step = len(max(rows[0][2].split(), key=len)) + 1
    step = max([step, *(len(cell) + 1 for _, _, cells in rows for cell in cells.split())])
    many = max(1, (width - len(rows[0][0]) - 2) // step)
    pieces: list[str] = []
    for first in count(0, many):
        cells = [(name, row[first * step : (first + many) * step].rstrip()) for name, _, row in rows]
        if not any(text for _, text in cells):
            return "\n".join(shortened(piece, width) for piece in pieces)
        pieces += [f"time {first}", *(f"{name} | {text}" for name, text in cells)]
    raise AssertionError("a grid ends")
