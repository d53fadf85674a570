"""Pipeline schedules as values, and the runtime that executes them.

The names that need torch are loaded when first used, so that drawing and checking a schedule starts at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pipeproof.pipeline.action import Action, ActionError, Kind
from pipeproof.pipeline.files import read_file
from pipeproof.pipeline.grid import grid
from pipeproof.pipeline.laws import check
from pipeproof.pipeline.lower import Program, lower, program_from_csv, read_csv
from pipeproof.pipeline.schedule import Schedule, ScheduleError, schedule_from_csv
from pipeproof.pipeline.schedules import build
from pipeproof.pipeline.simulate import Timeline, Times, simulate

if TYPE_CHECKING:
    from pipeproof.pipeline.profile import Profile as Profile
    from pipeproof.pipeline.step import PipelineSchedule as PipelineSchedule
    from pipeproof.pipeline.step import StepResult as StepResult

_NEEDS_TORCH = {"PipelineSchedule": "step", "StepResult": "step", "Profile": "profile"}

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
        return getattr(importlib.import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
    raise AttributeError(f"module 'pipeproof.pipeline' has no attribute {name!r}")
