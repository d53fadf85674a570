"""The grid as HTML: a row of cells for each rank, what each cell has to tell, and arrows."""

from collections.abc import Iterable, Iterator, Sequence

from pipeproof.core.measured import Sight
from pipeproof.core.verdict import small
from pipeproof.pipeline.action import Kind
from pipeproof.reports.columns import ROWS
from pipeproof.reports.page.grid import Arrow, Grid, Placed
from pipeproof.reports.page.markup import Html, html, joined, more, table, tag

_WIDE, _NARROW, _ROW = 46, 10, 34  # a cell with its label, one without, and a row, in 16ths of the letters' size
_LABELLED = 160  # columns; in more of them there are no labels
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input-gradient half of the backward",
    Kind.BACKWARD_WEIGHT: "weight-gradient half of the backward",
}
_SAID = {
    "right": "agrees",
    "through": "agrees by what it went into",
    "wrong": "wrong, and nothing before it was seen wrong",
    "consequence": "wrong, and so was what it was made from",
    "culprit": "the fault is here",
    "not compared": "not compared",
    "not recorded": "not recorded",
}


def grid_view(grid: Grid, first: int = 0) -> Html:
    """The grid, and what it says of the cell that is chosen; its cells are numbered from ``first`` on."""
    labelled = grid.width <= _LABELLED and all(len(one.done.action) <= 6 for row in grid.rows for one in row)
    wide = _WIDE if labelled else _NARROW
    numbers = iter(range(first, first + sum(map(len, grid.rows))))
    rows = [_row(rank, row, numbers, labelled) for rank, row in enumerate(grid.rows)]
    body = tag(
        "div",
        *rows,
        _arrows(grid, wide, first),
        class_="grid",
        role="grid",
        aria_label="Schedule: ranks down, actions in their order across",
        aria_rowcount=len(rows),
        aria_colcount=grid.width + 1,
        style=f"--w:{wide / 16}rem;--n:{grid.width};--h:{_ROW / 16}rem",
    )
    scroll = tag("div", body, class_="wide scroll", tabindex="-1")
    return joined(
        [
            _legend(),
            scroll,
            _of_no_action(grid),
            tag("div", class_="told", role="region", aria_label="The chosen action", aria_live="polite", tabindex="0"),
            _wrong(grid),
        ]
    )


def _row(rank: int, row: Sequence[Placed], numbers: Iterator[int], labelled: bool) -> Html:
    head = tag("div", tag("span", "rank "), str(rank), role="rowheader", class_="rank")
    cells = (_cell(one, number, labelled) for one, number in zip(row, numbers, strict=False))
    return tag("div", head, *cells, role="row", class_="row")


def _cell(one: Placed, number: int, labelled: bool) -> Html:
    name = one.done.action
    kind = {Kind.FORWARD: "f", Kind.BACKWARD_WEIGHT: "g"}.get(one.done.kind, "b")
    return tag(
        "div",
        name if labelled else None,
        class_=f"c {kind} {one.state.replace(' ', '-')} {one.step}".rstrip(),
        role="gridcell",
        style=f"--t:{one.column}",
        aria_label=f"{name}, {_SAID[one.state]}",
        aria_colindex=one.column + 2,
        tabindex="-1",
        data_k=number,
    )


def cells_told(grids: Iterable[Grid]) -> dict[str, object]:
    """What each cell says when it is chosen, for the page's script, by number; of all grids, one after the other."""
    return {"cells": [_told(one) for grid in grids for row in grid.rows for one in row], "said": _SAID}


def _told(one: Placed) -> list[object]:
    stage, kind, microbatch = one.done.stage, one.done.kind, one.done.microbatch
    known = "of a microbatch that nothing tells" if microbatch is None else f"of microbatch {microbatch}"
    head = f"{_NAMES[kind]} {known} at stage {stage}, on rank {one.rank}"
    sights = [[*_tensor(sight, microbatch)] for sight in one.done.sights]
    return [one.done.action, head, one.state, one.through, sights]


def _tensor(one: Sight, microbatch: int | None) -> Iterator[str]:
    """Its name, what was seen, what was expected, its error and what rounding allows, in words."""
    due = "not known" if microbatch is None else f"microbatch {microbatch}'s"
    yield f"{'made' if one.made else 'took'} {one.what}"
    seen = one.seen.removesuffix(f", expected {due}") or "another tensor"
    yield "not compared" if one.agrees is None else ("as expected" if one.agrees else seen)
    yield due
    yield "bit for bit" if one.error == 0 else ("-" if one.error is None else small(one.error))
    yield "" if one.limit is None else small(one.limit)


def _of_no_action(grid: Grid) -> Html | None:
    """Where the cause is, if that is no action of the grid."""
    cause = next(iter(grid.verdict.cause), None)
    if cause is None or any(one.state == "culprit" for row in grid.rows for one in row):
        return None
    return tag("p", f"The fault is in no single action: {cause.kind}, {cause.place}.")


def _wrong(grid: Grid) -> Html:
    """What is wrong in the grid, along the order of actions: the fault itself, and its consequences if asked for."""
    every = sorted((one for row in grid.rows for one in row), key=lambda one: one.column)
    own = [one for one in every if one.state == "culprit"]
    others = [one for one in every if one.state in ("wrong", "consequence")]
    own = [one for one in own if any(sight.agrees is False for sight in one.done.sights)]
    shown = _tensors(own, "The fault, tensor by tensor") if own else None
    rest = _tensors(others, "Along the order of actions") if others else None
    return joined([shown, more(f"{len(others)} more that are wrong", rest) if rest else None])


def _tensors(every: Sequence[Placed], caption: str) -> Html:
    rows = []
    for one in every[:ROWS]:
        sights = [sight for sight in one.done.sights if sight.agrees is False]
        rows += [[one.done.action, str(one.rank), *_tensor(sight, one.done.microbatch)] for sight in sights[:2]]
    head = ["action", "rank", "tensor", "seen", "expected", "error", "rounding allows"]
    left = len(every) - ROWS
    shown = table(head, rows, caption=caption, numbers=(5, 6))
    return joined([shown, tag("p", f"and {left} more actions", class_="quiet") if left > 0 else None])


def _arrows(grid: Grid, wide: int, first: int) -> Html | None:
    if not grid.arrows:
        return None
    width, height = grid.width * wide, len(grid.rows) * _ROW
    heads = [
        tag(
            "marker",
            tag("path", d="M0 0L8 4L0 8z"),
            id=f"{name}-{first}",
            class_=name,
            viewBox="0 0 8 8",
            refX="7",
            refY="4",
            markerWidth="9",
            markerHeight="9",
            markerUnits="userSpaceOnUse",
            orient="auto",
        )
        for name in ("came", "due")
    ]
    every = enumerate((one for row in grid.rows for one in row), start=first)
    numbers = {(one.rank, one.column): number for number, one in every}
    paths = [_path(one, wide, numbers[one.end], first) for one in grid.arrows]
    size = {"viewBox": f"0 0 {width} {height}", "style": f"width:{width / 16}rem;height:{height / 16}rem"}
    return tag("svg", tag("defs", *heads), *paths, class_="arrows", aria_hidden="true", **size)


def _path(one: Arrow, wide: int, cell: int, first: int) -> Html:
    """The way to the cell of that number."""
    (above, before), (below, after) = one.start, one.end
    x0, y0 = (before + 0.94) * wide, (above + 0.5) * _ROW
    x1, y1 = after * wide + 1, (below + (0.28 if one.due else 0.72)) * _ROW
    bend = max(14.0, abs(x1 - x0) / 2)
    name = "due" if one.due else "came"
    d = f"M{x0:.1f} {y0:.1f}C{x0 + bend:.1f} {y0:.1f} {x1 - bend:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    return tag("path", d=d, class_=name, marker_end=f"url(#{name}-{first})", data_to=cell)


def _legend() -> Html:
    """What colours and marks mean."""
    scale = [("x", "bit for bit"), ("a3", ""), ("a2", ""), ("a1", ""), ("a0", "rounding"), ("w0", "")]
    scale += [("w1", ""), ("w2", ""), ("w3", ""), ("w4", "10⁴ times that, or more")]
    steps = [joined([tag("i", class_=f"key {step}"), html(f" {text} " if text else "")]) for step, text in scale]
    marks = [
        ("culprit", "the fault"),
        ("wrong w4", "wrong as well"),
        ("consequence w4", "a consequence"),
        ("through x", "seen by what it went into"),
        ("not-compared", "not compared"),
        ("not-recorded", "not recorded"),
    ]
    keys = [tag("span", tag("i", class_=f"key {name}"), f" {text}") for name, text in marks]
    first = tag("span", "error ÷ what rounding allows ", *steps)
    arrows = tag("span", tag("b", "→", class_="came"), " came  ", tag("b", "⇢", class_="due"), " should have come")
    return tag("p", first, *keys, arrows, class_="legend")
