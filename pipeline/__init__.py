"""Pipeline schedules as values, and their runtime. Names load on first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeproof.pipeline.action import Action as Action
    from pipeproof.pipeline.action import ActionError as ActionError
    from pipeproof.pipeline.action import Kind as Kind
    from pipeproof.pipeline.files import read_file as read_file
    from pipeproof.pipeline.laws import check as check
    from pipeproof.pipeline.program import Program as Program
    from pipeproof.pipeline.program import lower as lower
    from pipeproof.pipeline.program import program_from_csv as program_from_csv
    from pipeproof.pipeline.program import read_csv as read_csv
    from pipeproof.pipeline.schedule import Schedule as Schedule
    from pipeproof.pipeline.schedule import ScheduleError as ScheduleError
    from pipeproof.pipeline.schedule import schedule_from_csv as schedule_from_csv
    from pipeproof.pipeline.schedules import build as build
    from pipeproof.pipeline.step import PipelineSchedule as PipelineSchedule
    from pipeproof.pipeline.step import ScheduleResult as ScheduleResult
    from pipeproof.pipeline.text_grid import grid as grid
    from pipeproof.pipeline.timeline import Timeline as Timeline
    from pipeproof.pipeline.timeline import Times as Times
    from pipeproof.pipeline.timeline import simulate as simulate
    from pipeproof.pipeline.trace import Profile as Profile

_HOMES = {
    "action": ("Action", "ActionError", "Kind"),
    "files": ("read_file",),
    "laws": ("check",),
    "program": ("Program", "lower", "program_from_csv", "read_csv"),
    "schedule": ("Schedule", "ScheduleError", "schedule_from_csv"),
    "schedules": ("build",),
    "step": ("PipelineSchedule", "ScheduleResult"),
    "text_grid": ("grid",),
    "timeline": ("Timeline", "Times", "simulate"),
    "trace": ("Profile",),
}

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module 'pipeproof.pipeline' has no attribute {name!r}")
