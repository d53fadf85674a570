"""Pipeline schedules as values, and the runtime that executes them.

What needs torch, or many modules, is loaded when first used, so that drawing and checking a schedule starts at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pipeproof.pipeline.action import Action, ActionError, Kind
from pipeproof.pipeline.grid import grid
from pipeproof.pipeline.lower import Program, lower, program_from_csv, read_csv
from pipeproof.pipeline.schedule import Schedule, ScheduleError, schedule_from_csv
from pipeproof.pipeline.simulate import Timeline, Times, simulate

if TYPE_CHECKING:
    from pipeproof.pipeline.files import read_file as read_file
    from pipeproof.pipeline.laws import check as check
    from pipeproof.pipeline.profile import Profile as Profile
    from pipeproof.pipeline.schedules import build as build
    from pipeproof.pipeline.step import PipelineSchedule as PipelineSchedule
    from pipeproof.pipeline.step import StepResult as StepResult

_NEEDS_TORCH = {"PipelineSchedule": "step", "StepResult": "step", "Profile": "profile"}
_HOMES = {**_NEEDS_TORCH, "build": "schedules", "check": "laws", "read_file": "files"}

__all__ = [
    "Action",
    "ActionError",
    "Kind",
    "Program",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "Times",
    "grid",
    "lower",
    "program_from_csv",
    "read_csv",
    "schedule_from_csv",
    "simulate",
    *_HOMES,
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pipeproof.pipeline' has no attribute {name!r}")
