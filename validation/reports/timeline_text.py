"""A schedule in text: its grid, its time, bubbles, memory and messages."""

from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.text_grid import draw
from pipeproof.pipeline.timeline import Timeline, Times
from pipeproof.reports.columns import in_pieces


def draw_grid(name: str, timeline: Timeline, width: int | None) -> str:
    """The grid, in pieces so wide, below its name and sizes."""
    try:
        grid = draw(timeline)
    except ScheduleError as error:  # a grid has whole units only; a picture has any
        grid = f"({error}; --svg or --png draws it)"
    return f"{name}: {timeline.schedule.sizes}\n{in_pieces(grid, width)}"


def summarize(timeline: Timeline, times: Times) -> str:
    """What a timeline comes to."""
    f, i, w = times.forward, times.backward_input, times.backward_weight
    equal = f"T_F = T_I = T_W = {f:g} per stage" if f == i == w else f"T_F = {f:g}, T_I = {i:g}, T_W = {w:g} per stage"
    return "\n".join(
        [
            f"makespan {timeline.makespan:g} ({equal}, T_B = T_I + T_W = {i + w:g}, no latency)",
            f"bubble   global {timeline.global_bubble:g} ({timeline.bubble_fraction:.1%}), "
            f"local {timeline.local_bubble:g}",
            "memory   peak activations per rank, in microbatches of one stage: "
            + ", ".join(f"{peak:g}" for peak in timeline.peaks),
            f"messages {timeline.messages}",
        ]
    )
