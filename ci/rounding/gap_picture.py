"""The picture of tolerances: a panel per dtype, floors as bands and the smallest faults as lines above them."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gaps import Row
from least_faults import FAULTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_IN, _HEIGHT_IN = 3.6, 4.4
_FLOOR = "#888888"
_COLOURS = ("#c0392b", "#d68910", "#1e8449", "#117a65", "#2471a3", "#6c3483")


def gap_picture(rows: Sequence[Row]) -> bytes:
    """``rows`` as an SVG file: relative errors over the number of microbatches. Equal rows, equal bytes."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "pipeproof", "font.family": "DejaVu Sans"}):
        _figure(rows).savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _figure(rows: Sequence[Row]) -> "Figure":
    from matplotlib.figure import Figure

    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    figure = Figure(figsize=(_PANEL_IN * len(dtypes) + 1.6, _HEIGHT_IN), facecolor="white", layout="constrained")
    panels = figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for axes, dtype in zip(panels, dtypes, strict=True):
        _panel(axes, dtype, [row for row in rows if row.dtype == dtype])
    panels[0].set_ylabel("relative error of a gradient", fontsize=8)
    # The panel with the most lines names them all.
    named = max((axes.get_legend_handles_labels() for axes in panels), key=lambda pair: len(pair[1]))
    figure.legend(*named, loc="outside right upper", fontsize=7.5, frameon=False)
    return figure


def _panel(axes: "Axes", dtype: str, rows: Sequence[Row]) -> None:
    counts = sorted({row.microbatches for row in rows})
    floors = [[max(row.permutation, row.rounding) for row in rows if row.microbatches == count] for count in counts]
    axes.fill_between(counts, list(map(min, floors)), list(map(max, floors)), color=_FLOOR, label="floor, all models")
    for fault, colour in zip(FAULTS, _COLOURS, strict=True):
        found = [
            [gap.effect for row in rows if row.microbatches == count and (gap := row.gaps[fault.name])]
            for count in counts
        ]
        if all(found):
            axes.plot(counts, list(map(min, found)), color=colour, marker="o", markersize=3, label=fault.name)
    axes.set_title(dtype, loc="left", fontsize=9.5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("microbatches", fontsize=8)
    axes.tick_params(labelsize=7.5)
    axes.grid(visible=True, linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)
