"""Pipeline schedules as values, and the runtime that executes them.

The names that need torch are loaded when first used, so that drawing and checking a schedule starts at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pipeline.action import Action, ActionError, Kind
from pipeline.files import read_file
from pipeline.grid import grid
from pipeline.laws import check
from pipeline.lower import Program, lower, program_from_csv, read_csv
from pipeline.schedule import Schedule, ScheduleError, schedule_from_csv
from pipeline.schedules import build
from pipeline.simulate import Timeline, Times, simulate

if TYPE_CHECKING:
    from pipeline.profile import Profile as Profile
    from pipeline.step import PipelineSchedule as PipelineSchedule
    from pipeline.step import StepResult as StepResult

_NEEDS_TORCH = {"PipelineSchedule": "pipeline.step", "StepResult": "pipeline.step", "Profile": "pipeline.profile"}

__all__ = [
    "Action",
    "ActionError",
    "Kind",
    "PipelineSchedule",
    "Profile",
    "Program",
    "Schedule",
    "ScheduleError",
    "StepResult",
    "Timeline",
    "Times",
    "build",
    "check",
    "grid",
    "lower",
    "program_from_csv",
    "read_csv",
    "read_file",
    "schedule_from_csv",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
