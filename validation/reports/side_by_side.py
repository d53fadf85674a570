"""Two schedules with the same work: timelines in one unit, and numbers side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import lcm

from pipeproof.pipeline.costs import trace_of
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.timeline import Timeline, Times, simulate
from pipeproof.pipeline.trace import Trace
from pipeproof.reports.columns import Column, table


@dataclass(frozen=True)
class SideBySide:
    """Two simulations for one model, by name: a stage of S takes ``parts`` / S units, and as much memory."""

    parts: int
    timelines: dict[str, Timeline]

    @classmethod
    def of(cls, schedules: Sequence[Schedule], times: Times) -> "SideBySide":
        """Simulate each of two ``schedules``; ``times``: of the smaller stages' common part."""
        parts = lcm(*(schedule.n_stages for schedule in schedules))
        timelines: dict[str, Timeline] = {}
        for schedule in schedules:
            size = parts / schedule.n_stages
            own = (times.forward * size, times.backward_input * size, times.backward_weight * size)
            name = f"{schedule.name} again" if schedule.name in timelines else schedule.name
            timelines[name] = simulate(schedule, Times(*own))
        return cls(parts, timelines)

    @property
    def traces(self) -> dict[str, Trace]:
        """Timelines for drawing."""
        return {name: trace_of(timeline) for name, timeline in self.timelines.items()}

    def text(self, width: int | None = None) -> str:
        """Numbers of both, and their unit."""
        numbers = []
        for timeline in self.timelines.values():
            memory, bubble = max(timeline.peaks) * self.parts / timeline.schedule.n_stages, timeline.bubble_fraction
            shares = ("", f"({bubble:.1%})", "", "", "")  # of the makespan, if meaningful
            own = timeline.makespan, timeline.global_bubble, timeline.local_bubble, memory, timeline.messages
            numbers.append(zip(own, shares, strict=True))
        rows = []
        for what, (one, share), (other, beside) in zip(_ROWS, *numbers, strict=True):
            change = f" ({(other - one) / one:+.1%})" if one else ""
            change_text = f"{other - one:+g}{change}" if other != one else "0"
            rows.append((what, f"{one:g}", share, f"{other:g}", beside, change_text))
        both = ((Column(name, right=True), Column("", right=True, drop=2)) for name in self.timelines)
        columns = [Column(""), *chain.from_iterable(both), Column("difference", right=True, drop=1)]
        explained = "memory: the most that a rank holds, in microbatches of one stage"
        if self.unit:
            sizes = {name: self.parts // timeline.schedule.n_stages for name, timeline in self.timelines.items()}
            stages = " and ".join(f"a stage of {name} is {size}" for name, size in sizes.items())
            explained = f"one unit of time and of memory is 1/{self.parts} of the model with one microbatch: {stages}"
        return f"{table(columns, rows, width)}\n{explained}"

    @property
    def unit(self) -> str:
        """Unit of time."""
        alike = len({timeline.schedule.n_stages for timeline in self.timelines.values()}) == 1
        return "" if alike else f"T_F, T_I and T_W of 1/{self.parts} of the model"


_ROWS = ("makespan", "global bubble", "local bubble", "memory", "messages")
