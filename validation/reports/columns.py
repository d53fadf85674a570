"""Tables and grids at a terminal's width, laid out by rich. Width None means a file: everything is written."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeproof.pipeline.sizes import shorten

ROWS = 60  # or columns, of a table in a page: the others are counted; GitHub shows no more than 1 MiB
_OF_A_FILE = 1 << 16  # letters in a line: more than any table has


def columns() -> int:
    """How wide what is printed may be: as COLUMNS says, or the terminal; 100 where there is neither."""
    return shutil.get_terminal_size((100, 24)).columns


@dataclass(frozen=True)
class Column:
    """A column: its name, and its width for rows printed one by one.

    ``right``: for numbers. ``drop``: columns are dropped by this number, largest first; 0 stays.
    """

    name: str
    width: int = 0
    right: bool = False
    drop: int = 0

    def least(self, text: str) -> int:
        """The least width for ``text``: a whole number, or the longest word."""
        return cell_len(text) if self.right else max(map(cell_len, text.split()), default=0)


def header(columns: Sequence[Column], width: int | None) -> str:
    """The line of column names above ``row``."""
    return row(columns, [column.name for column in columns], width)


def row(columns: Sequence[Column], cells: Sequence[str], width: int | None) -> str:
    """Format one line before its later rows are known; cells are cut to their columns, except in a file."""
    behind = zip(columns[1:], columns, strict=False)
    apart = ["", *(" " if before.right and not one.right else "" for one, before in behind)]  # text behind a number
    cells = [space + cell for space, cell in zip(apart, cells, strict=True)]
    longest = [cell_len(cell) if width is None else 0 for cell in cells]
    wide = [max(one.width + len(space), most) for one, space, most in zip(columns, apart, longest, strict=True)]
    columns = [replace(one, width=own) for one, own in zip(columns, wide, strict=True)]
    kept = _fitting(columns, width, gap=1)
    return _print_table([columns[k] for k in kept], [[cells[k] for k in kept]], width, gap=1)


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Format a table with columns as wide as their content; long text takes several lines.

    Empty columns are dropped, and so is the header if no column has a name.
    """
    there = [k for k in range(len(columns)) if k == 0 or any(cells[k] for cells in rows)]
    head = [[column.name for column in columns]] if any(column.name for column in columns) else []
    texts = [[cells[k] for k in there] for cells in (*head, *rows)]
    every = [*zip((columns[k] for k in there), zip(*texts, strict=True), strict=True)]
    least = [replace(column, width=max(map(column.least, own))) for column, own in every]
    wish = [max(map(cell_len, own)) - column.width for column, (_, own) in zip(least, every, strict=True)]
    kept = _fitting(least, width, gap=2)
    room = _OF_A_FILE if width is None else width - _width_of(least, kept, gap=2)
    share = min(1.0, max(0, room) / (sum(wish[k] for k in kept) or 1))
    shown = [replace(least[k], width=least[k].width + int(share * wish[k])) for k in kept]
    return _print_table(shown, [[cells[k] for k in kept] for cells in texts], width, gap=2)


def _fitting(columns: Sequence[Column], width: int | None, *, gap: int) -> list[int]:
    """Choose columns that fit."""
    kept = list(range(len(columns)))
    for k in sorted(kept, key=lambda k: -columns[k].drop):
        if width is not None and columns[k].drop and _width_of(columns, kept, gap=gap) > width:
            kept.remove(k)
    return kept


def _width_of(columns: Sequence[Column], kept: Sequence[int], *, gap: int) -> int:
    """Add up column widths."""
    return sum(columns[k].width + gap for k in kept) - gap


def _print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None, *, gap: int) -> str:
    """Print ``rows`` by rich; numbers, and all cells with a ``gap`` of 1, stay on one line."""
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
    """Split a grid of rows ``rank 0 | cells``, with cells of one width, into pieces, each with its start."""
    lines = [line.partition(" | ") for line in grid.splitlines()]
    if width is None or not all(bar for _, bar, _ in lines) or len(grid.splitlines()[0]) <= width:
        return grid
    step = 1 + max(len(cell) for _, _, cells in lines for cell in cells.split())
    piece = step * max(1, (width - len(lines[0][0]) - 2) // step)
    pieces: list[str] = []
    for first in range(0, len(lines[0][2]), piece):
        pieces.append(f"time {first // step}")
        pieces += [f"{name} | {cells[first : first + piece].rstrip()}" for name, _, cells in lines]
    return "\n".join(shorten(piece, width) for piece in pieces)
