"""What the command ``show`` says of a schedule on paper, and draws."""

from pipeline.costs import trace_of
from pipeline.grid import draw
from pipeline.schedule import Schedule, ScheduleError
from pipeline.simulate import Timeline, Times, simulate
from validation.reports.drawings import Drawings, Paths


def show(schedule: Schedule, times: Times, paths: Paths) -> str:
    """``schedule`` simulated with ``times``, as text, after the files at ``paths`` are written."""
    with Drawings(paths, actions=sum(map(len, schedule.ranks))) as drawings:
        timeline = simulate(schedule, times)
        text = described(timeline, times)
        drawings.write({f"{schedule.name}, simulated": trace_of(timeline)})
    return text


def described(timeline: Timeline, times: Times) -> str:
    """The grid, and what it comes to."""
    f, i, w = times.forward, times.backward_input, times.backward_weight
    equal = f"T_F = T_I = T_W = {f:g} per stage" if f == i == w else f"T_F = {f:g}, T_I = {i:g}, T_W = {w:g} per stage"
    return "\n".join(
        [
            _grid(timeline),
            f"makespan {timeline.makespan:g} ({equal}, T_B = T_I + T_W = {i + w:g}, no latency)",
            f"bubble   global {timeline.global_bubble:g} ({timeline.bubble_fraction:.1%}), "
            f"local {timeline.local_bubble:g}",
            "memory   peak activations per rank, in microbatches of one stage: "
            + ", ".join(f"{peak:g}" for peak in timeline.peaks),
            f"messages {timeline.messages}",
        ]
    )


def _grid(timeline: Timeline) -> str:
    try:
        return draw(timeline)
    except ScheduleError as error:  # a grid has whole units only; a picture has any
        return f"({error}; --svg or --png draws it)"
