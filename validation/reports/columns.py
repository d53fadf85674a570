"""Tables and grids as wide as a terminal; rich lays tables out. A width of None is that of a file: all is written."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeproof.pipeline.sizes import shortened

ROWS = 60  # or columns, of a table in a page: the others are counted; GitHub shows no more than 1 MiB
_OF_A_FILE = 1 << 16  # letters in a line: more than any table has


@dataclass(frozen=True)
class Column:
    """A column: its name, and how wide it is where rows come one by one.

    ``right``: it has numbers. ``drop``: columns are left out by this number, the largest first; those of 0 stay.
    """

    name: str
    width: int = 0
    right: bool = False
    drop: int = 0

    def least(self, text: str) -> int:
        """How wide ``text`` is at least: a number is whole, and the longest word of other text."""
        return cell_len(text) if self.right else max(map(cell_len, text.split()), default=0)


def header(columns: Sequence[Column], width: int | None) -> str:
    """The names of columns, above what ``row`` makes."""
    return row(columns, [column.name for column in columns], width)


def row(columns: Sequence[Column], cells: Sequence[str], width: int | None) -> str:
    """One line of a table whose other rows are not known; a cell is cut to its column, but for a file."""
    behind = zip(columns[1:], columns, strict=False)
    apart = ["", *(" " if before.right and not one.right else "" for one, before in behind)]  # text behind a number
    cells = [space + cell for space, cell in zip(apart, cells, strict=True)]
    longest = [cell_len(cell) if width is None else 0 for cell in cells]
    wide = [max(one.width + len(space), most) for one, space, most in zip(columns, apart, longest, strict=True)]
    columns = [replace(one, width=own) for one, own in zip(columns, wide, strict=True)]
    kept = _fitting(columns, width, gap=1)
    return _printed([columns[k] for k in kept], [[cells[k] for k in kept]], width, gap=1)


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """A table whose columns are as wide as what is in them; text that has no room takes several lines.

    A column with nothing in it is left out, and so is the header where no column has a name.
    """
    there = [k for k in range(len(columns)) if k == 0 or any(cells[k] for cells in rows)]
    head = [[column.name for column in columns]] if any(column.name for column in columns) else []
    texts = [[cells[k] for k in there] for cells in (*head, *rows)]
    every = [*zip((columns[k] for k in there), zip(*texts, strict=True), strict=True)]
    least = [replace(column, width=max(map(column.least, own))) for column, own in every]
    wish = [max(map(cell_len, own)) - column.width for column, (_, own) in zip(least, every, strict=True)]
    kept = _fitting(least, width, gap=2)
    room = _OF_A_FILE if width is None else width - _taken(least, kept, gap=2)
    share = min(1.0, max(0, room) / (sum(wish[k] for k in kept) or 1))
    shown = [replace(least[k], width=least[k].width + int(share * wish[k])) for k in kept]
    return _printed(shown, [[cells[k] for k in kept] for cells in texts], width, gap=2)


def _fitting(columns: Sequence[Column], width: int | None, *, gap: int) -> list[int]:
    """Which columns there is room for."""
    kept = list(range(len(columns)))
    for k in sorted(kept, key=lambda k: -columns[k].drop):
        if width is not None and columns[k].drop and _taken(columns, kept, gap=gap) > width:
            kept.remove(k)
    return kept


def _taken(columns: Sequence[Column], kept: Sequence[int], *, gap: int) -> int:
    """How wide these columns are together."""
    return sum(columns[k].width + gap for k in kept) - gap


def _printed(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None, *, gap: int) -> str:
    """The lines that rich makes of ``rows``; numbers, and all cells with a ``gap`` of 1, stay on one line."""
    made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=False)
    for column in columns:
        side: Literal["left", "right"] = "right" if column.right else "left"
        made.add_column(justify=side, no_wrap=column.right or gap == 1, width=column.width)
    for cells in rows:
        made.add_row(*map(Text, cells))
    console = Console(width=width or _OF_A_FILE, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(made)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def in_pieces(grid: str, width: int | None) -> str:
    """A grid of rows ``rank 0 | cells``, all cells of one width, in pieces one below the other; each says its start."""
    lines = [line.partition(" | ") for line in grid.splitlines()]
    if width is None or not all(bar for _, bar, _ in lines) or len(grid.splitlines()[0]) <= width:
        return grid
    step = 1 + max(len(cell) for _, _, cells in lines for cell in cells.split())
    piece = step * max(1, (width - len(lines[0][0]) - 2) // step)
    pieces: list[str] = []
    for first in range(0, len(lines[0][2]), piece):
        pieces.append(f"time {first // step}")
        pieces += [f"{name} | {cells[first : first + piece].rstrip()}" for name, _, cells in lines]
    return "\n".join(shortened(piece, width) for piece in pieces)
