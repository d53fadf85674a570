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
        rows = []
        for what, (one, share), (other, beside) in zip(
            _ROWS, *map(self._numbers, self.timelines.values()), strict=True
        ):
            change = f" ({(other - one) / one:+.1%})" if one else ""
            change_text = f"{other - one:+g}{change}" if other != one else "0"
            rows.append((what, f"{one:g}", share, f"{other:g}", beside, change_text))
        both = ((Column(name, right=True), Column("", right=True, drop=2)) for name in self.timelines)
        columns = [Column(""), *chain.from_iterable(both), Column("difference", right=True, drop=1)]
        return f"{table(columns, rows, width)}\n{self._explained}"

    def _numbers(self, timeline: Timeline) -> list[tuple[float, str]]:
        """Every row's number, and its share of the makespan if meaningful."""
        size = self.parts / timeline.schedule.n_stages
        return [
            (timeline.makespan, ""),
            (timeline.global_bubble, f"({timeline.bubble_fraction:.1%})"),
            (timeline.local_bubble, ""),
            (max(timeline.peaks) * size, ""),
            (timeline.messages, ""),
        ]

    @property
    def unit(self) -> str:
        """Unit of time."""
        alike = len({timeline.schedule.n_stages for timeline in self.timelines.values()}) == 1
        return "" if alike else f"T_F, T_I and T_W of 1/{self.parts} of the model"

    @property
    def _explained(self) -> str:
        if not self.unit:
            return "memory: the most that a rank holds, in microbatches of one stage"
        sizes = {name: self.parts // timeline.schedule.n_stages for name, timeline in self.timelines.items()}
        stages = " and ".join(f"a stage of {name} is {size}" for name, size in sizes.items())
        return f"one unit of time and of memory is 1/{self.parts} of the model with one microbatch: {stages}"


_ROWS = ("makespan", "global bubble", "local bubble", "memory", "messages")
