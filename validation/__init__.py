"""pipeproof: a pipeline schedule must not change the answer.

``Case`` says what to run, ``World`` where, ``validate`` gives the ``Verdict``. ``PipelineSchedule`` runs any of
``pipeproof.pipeline``'s schedules on your ranks. ``whitebox.validate`` judges your own step, ``check_step`` a step of a
running job by a record that ``record_step`` and ``write_record`` made, or by a ``SingleDevice`` beside it. They load
when first used, so that a command that needs no torch does not wait for it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pipeproof.foreign as whitebox
    from pipeproof.cases.case import Case as Case
    from pipeproof.cases.validator import validate as validate
    from pipeproof.judging.verdict import Verdict as Verdict
    from pipeproof.pipeline.step import PipelineSchedule as PipelineSchedule
    from pipeproof.records.single_device import SingleDevice as SingleDevice
    from pipeproof.records.step_check import check_step as check_step
    from pipeproof.records.step_record import record_step as record_step
    from pipeproof.records.step_record import write_record as write_record
    from pipeproof.worlds.world import World as World

_HOMES = {
    "Case": "cases.case",
    "PipelineSchedule": "pipeline.step",
    "SingleDevice": "records.single_device",
    "Verdict": "judging.verdict",
    "World": "worlds.world",
    "check_step": "records.step_check",
    "page": "reports.page.page",
    "record_step": "records.step_record",
    "validate": "cases.validator",
    "write_record": "records.step_record",
}

__all__ = [
    "Case",
    "PipelineSchedule",
    "SingleDevice",
    "Verdict",
    "World",
    "check_step",
    "record_step",
    "validate",
    "whitebox",
    "write_record",
]


def __getattr__(name: str) -> Any:
    if name == "whitebox":
        return importlib.import_module("pipeproof.foreign")
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("pipeproof")
    if name in _HOMES:
        return getattr(importlib.import_module(f"pipeproof.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pipeproof' has no attribute {name!r}")
