"""Timelines as pictures: ranks from top to bottom, time from left to right, panels stacked on one axis.

A kind of action has a hue, and a rank's stages are shades of it. I wears a bar at its upper edge and W at its lower
edge, for eyes and printers without hues. Actions that run as one share a frame. Sends and receives are dark, and
uncovered time is idle. A schedule that breaks a law is drawn by slots, with the culprits in red.

A cell is named if its name fits, and all cells of a panel in one way. If most are too narrow, every n-th microbatch is
dark, so that the eye can follow it from rank to rank.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from math import ceil, floor, log2

from pipeproof.pipeline.action import COMPUTE, Action, Kind
from pipeproof.reports.canvas import Box, Drawing, Text, text_width, wrap_text
from pipeproof.reports.colours import BLACK, IDLE, MESSAGE, WHITE, WRONG, colour_of, letters_on, mix
from pipeproof.reports.panel import WORDS, Cell, Panel

_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 18.0, 12.0, 12.0
_CELL, _ROOMS = 24.0, (580.0, 1652.0)  # one of the shorter actions, and all of them at least and at most
_ROW, _ROWS = 26.0, 8640.0  # a rank, and all of them at most
_COVERED, _BAR = 0.84, 0.2  # of a row; and of a cell, the edge that I and W have
_TITLE, _SMALL, _NAME = 9.5, 8.0, 7.5  # sizes of letters
_LINE = 1.45  # from one line of letters to the next, as a part of their size
_PAD = 1.5  # on either side of a name
_GAP = 0.12  # of a cell at most: the white between it and the next
_FOLLOWED = 8  # microbatches that stand out where none is named
_FADED = 0.6
_GREY = "#555555"


_Naming = Callable[[Action], str]


def _number(action: Action) -> str:
    return str(action.microbatch)


_NAMINGS: tuple[_Naming, ...] = (str, _number)  # ways to name a cell: the first for which most have room


class _Placed:
    """A panel with rows from ``top`` down, each ``row`` high; ``room``: the width from 0 to ``end`` on the axis."""

    def __init__(self, panel: Panel, *, room: float, row: float, end: float) -> None:
        self.panel = panel
        self.top = 0.0
        self._room, self._row, self._end = room, row, end
        self._computing = [cell for cell in panel.cells if cell.action.kind in COMPUTE]
        self.naming: _Naming | None = None
        self._needs: dict[Kind, float] = {}
        for way in _NAMINGS if _COVERED * (1 - 2 * _BAR) * row >= _NAME * 1.1 else ():
            self._needs = _needs(self._computing, way)
            if 2 * sum(map(self._fits, self._computing)) >= len(self._computing):
                self.naming = way
                break
        count = panel.schedule.microbatches
        self.every = 0 if self.naming or count <= 2 else 2 ** max(1, ceil(log2(count / _FOLLOWED)))

    @property
    def bottom(self) -> float:
        return self.top + self.panel.schedule.n_ranks * self._row

    def boxes(self) -> Iterator[Box]:
        """Draw idle rows, cells above them, and frames around overlapping actions."""
        panel = self.panel
        for rank in range(panel.schedule.n_ranks):
            yield self._box(rank, 0, panel.end)._replace(fill=IDLE)
        as_one = set(chain.from_iterable(panel.pairs))
        for cell in panel.cells:
            area = self._box(cell.rank, cell.left, cell.right)
            gap = min(0.9, _GAP * area.width) if cell.action.kind in COMPUTE and cell not in as_one else 0.0
            area = area._replace(left=area.left + gap / 2, width=area.width - gap, says=cell.says)
            yield from paint(cell.action.kind, self._fill(cell), area)
        for one, other in panel.pairs:
            frame = self._box(one.rank, one.left, other.right)
            yield frame._replace(edge=BLACK, edge_width=min(1.1, 0.05 * frame.width))

    def texts(self) -> Iterator[Text]:
        """Draw row names, and cell names that fit."""
        wrong = {cell.rank for cell in self.panel.cells if cell.wrong}
        step = max(1, ceil(_SMALL * 1.2 / self._row))
        for rank in range(self.panel.schedule.n_ranks):
            if rank % step == 0 or rank in wrong:
                colour, middle = (WRONG if rank in wrong else BLACK), self.top + (rank + 0.5) * self._row
                yield Text(f"rank {rank}", _LEFT - 6, middle, min(_SMALL, self._row), "end", colour, rank in wrong)
        for cell in self._computing:
            if self.naming and self._fits(cell):
                box = self._box(cell.rank, cell.left, cell.right)
                left, middle = box.left + box.width / 2, box.top + box.height / 2
                letters = letters_on(self._fill(cell))
                yield Text(self.naming(cell.action), left, middle, _NAME, "middle", letters)

    def ticks(self) -> Iterator[Text]:
        """Draw numbers under the axis, at steps of 1, 2 or 5 times a power of ten."""
        shown = self._end * self.panel.per_tick
        least = max(shown * 44 / self._room, 1.0 if self.panel.wrong else 0.0)  # slots are whole
        step = next(step for power in range(-15, 18) for part in (1, 2, 5) if (step := part * 10.0**power) >= least)
        for k in range(floor(shown / step * (1 + 1e-9)) + 1):
            at = self._x(k * step / self.panel.per_tick)
            yield Text(f"{k * step:g}", at, self.bottom + 6, _NAME, "middle", _GREY)

    def _fill(self, cell: Cell) -> str:
        stage, kind, microbatch = cell.action
        if cell.wrong:
            return WRONG
        stressed = self.every > 0 and microbatch % self.every == 0
        colour = colour_of(kind, self.panel.places.get(stage, 0), places=self.panel.most, stressed=stressed)
        return mix(colour, WHITE, _FADED) if self.panel.wrong else colour

    def _fits(self, cell: Cell) -> bool:
        return self._x(cell.right) - self._x(cell.left) + 1e-6 >= self._needs[cell.action.kind]

    def _x(self, at: float) -> float:
        return _LEFT + (at / self._end * self._room if self._end else 0.0)

    def _box(self, rank: int, left: float, right: float) -> Box:
        """The part of a rank's row between two places on the axis."""
        top = self.top + (rank + (1 - _COVERED) / 2) * self._row
        return Box(self._x(left), top, self._x(right) - self._x(left), _COVERED * self._row, "")


def _needs(cells: Sequence[Cell], way: _Naming) -> dict[Kind, float]:
    """The width that each kind needs for its longest name."""
    longest: dict[Kind, float] = {}
    for cell in cells:
        width = text_width(way(cell.action), _NAME) + 2 * _PAD
        longest[cell.action.kind] = max(longest.get(cell.action.kind, 0.0), width)
    return longest


def paint(kind: Kind, colour: str, area: Box) -> Iterator[Box]:
    """Paint ``area`` as an action of ``kind`` in ``colour``: I has a dark bar at its upper edge, W at its lower."""
    yield area._replace(fill=colour)
    bar = area._replace(height=_BAR * area.height, fill=mix(colour, BLACK, 0.45), says="")
    if kind is Kind.BACKWARD_INPUT:
        yield bar
    elif kind is Kind.BACKWARD_WEIGHT:
        yield bar._replace(top=area.top + (1 - _BAR) * area.height)


def picture(panels: Sequence[Panel]) -> Drawing:
    """Draw ``panels`` from the top down, on one axis."""
    assert len({panel.axis for panel in panels}) == 1, "panels that share an axis share a unit"
    end = max(panel.end for panel in panels)
    room = max(_room(panel, end) for panel in panels)
    row = min(_ROW, _ROWS / sum(panel.schedule.n_ranks for panel in panels))
    placed = [_Placed(panel, room=room, row=row, end=end) for panel in panels]
    boxes, texts, top = _legend(placed, room)
    for each in placed:
        for text, size in ((each.panel.title, _TITLE), (" · ".join(each.panel.facts), _SMALL)):
            for line in wrap_text(text, width=room, size=size):
                texts.append(Text(line, _LEFT, top + size * _LINE / 2, size, bold=size == _TITLE))
                top += size * _LINE
        each.top = top + 2
        boxes += each.boxes()
        texts += [*each.texts(), *each.ticks()]
        top = each.bottom + 24
    texts.append(Text(panels[0].axis, _LEFT + room / 2, top - 4, _SMALL, "middle", _GREY))
    says = ". ".join(": ".join((panel.title, ", ".join(panel.facts))) for panel in panels)
    return Drawing(_LEFT + room + _RIGHT, top + _BOTTOM, tuple(boxes), tuple(texts), says)


def _room(panel: Panel, end: float) -> float:
    """The axis width at which nearly every name fits its cell, within reason."""
    cells = [cell for cell in panel.cells if cell.action.kind in COMPUTE]
    lasts = sorted(cell.right - cell.left for cell in cells)
    for way in _NAMINGS if cells else ():
        # A quarter of the cells may be too short for their names.
        room = max(_ROOMS[0], end * max(_CELL, *_needs(cells, way).values()) / lasts[len(cells) // 4])
        if room <= _ROOMS[1]:
            return room
    return _ROOMS[1] if cells else _ROOMS[0]


_SAMPLE = Box(0, 0, 22, 12, "")


def _legend(placed: Sequence[_Placed], room: float) -> tuple[list[Box], list[Text], float]:
    """Draw named samples, in as many lines as needed, and notes below; return their end, too."""
    panels = [each.panel for each in placed]
    kinds = {cell.action.kind for panel in panels for cell in panel.cells}
    most, wrong = max(panel.most for panel in panels), any(panel.wrong for panel in panels)
    samples = [
        ([*paint(kind, colour_of(kind, places=most), _SAMPLE)], f"{kind} {words}", kind in kinds)
        for kind, words in WORDS.items()
    ]
    samples += [
        ([_SAMPLE._replace(edge=BLACK, edge_width=1.1)], "run as one", any(panel.pairs for panel in panels)),
        ([_SAMPLE._replace(fill=MESSAGE)], "messages", bool(kinds - COMPUTE)),
        ([_SAMPLE._replace(fill=WRONG)], "breaks a law", wrong),
        ([_SAMPLE._replace(fill=IDLE)], "idle", not wrong),
    ]
    boxes: list[Box] = []
    texts: list[Text] = []
    left, top = _LEFT, _TOP
    for sample, words, there in samples:
        width = 30 + text_width(words, _SMALL)
        if not there:
            continue
        if left > _LEFT and left + width > _LEFT + room:
            left, top = _LEFT, top + 18
        boxes += [box._replace(left=box.left + left, top=box.top + top) for box in sample]
        texts.append(Text(words, left + 28, top + 6, _SMALL))
        left += width + 14
    top += 20
    ways = {each.naming for each in placed}
    notes = ["dark to pale: the first to the last stage of a rank"] * (most > 1)
    notes += ["2F0: stage 2, forward, microbatch 0"] * (str in ways) + ["a number: the microbatch"] * (_number in ways)
    for every in sorted({each.every for each in placed} - {0}):
        notes.append(f"darkest: microbatches 0, {every}, {2 * every} and so on")
    for line in wrap_text(" · ".join(notes), width=room, size=_SMALL):
        texts.append(Text(line, _LEFT, top + 4, _SMALL, "start", _GREY))
        top += _SMALL * _LINE
    return boxes, texts, top + 8
