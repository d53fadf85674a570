"""pipeproof: a pipeline schedule must not change the answer.

``Case`` says what to run, ``World`` where, ``validate`` returns the ``Verdict``. ``PipelineSchedule`` runs any
``pipeproof.pipeline`` schedule on your ranks. ``whitebox.validate`` judges your own step, ``check_step`` a running
job's step against a record from ``record_step`` and ``write_record``, or against a ``SingleDevice``; ``log_verdict``
logs its verdict to a dashboard. ``record_run`` stores data to compare two long runs. ``megatron`` and the other
adapters are here too. Names load on first use, so that commands without torch start at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pipeproof.errors as errors
    import pipeproof.whitebox as whitebox
    from pipeproof.core.contract import Contract as Contract
    from pipeproof.core.observe.watching import watch as watch
    from pipeproof.core.verdict import Verdict as Verdict
    from pipeproof.own.case import Case as Case
    from pipeproof.own.validator import validate as validate
    from pipeproof.pipeline.step import PipelineSchedule as PipelineSchedule
    from pipeproof.records.dashboard import log_verdict as log_verdict
    from pipeproof.records.single_device import SingleDevice as SingleDevice
    from pipeproof.records.step_check import check_step as check_step
    from pipeproof.records.step_record import record_step as record_step
    from pipeproof.records.step_record import write_record as write_record
    from pipeproof.whitebox.handed_back import StepResult as StepResult
    from pipeproof.wings.adapters import colossalai as colossalai
    from pipeproof.wings.adapters import deepspeed as deepspeed
    from pipeproof.wings.adapters import megatron as megatron
    from pipeproof.wings.adapters import nanotron as nanotron
    from pipeproof.wings.adapters import torchtitan as torchtitan
    from pipeproof.wings.adapters import transformers as transformers
    from pipeproof.wings.composed import StageByStage as StageByStage
    from pipeproof.wings.runs import record_run as record_run
    from pipeproof.wings.simulated import SimulatedWorld as SimulatedWorld
    from pipeproof.worlds.world import World as World

_HOMES = {
    "Case": "own.case",
    "StageByStage": "wings.composed",
    "Contract": "core.contract",
    "PipelineSchedule": "pipeline.step",
    "SimulatedWorld": "wings.simulated",
    "SingleDevice": "records.single_device",
    "StepResult": "whitebox.handed_back",
    "Verdict": "core.verdict",
    "World": "worlds.world",
    "check_step": "records.step_check",
    "log_verdict": "records.dashboard",
    "page": "reports.page.page",
    "record_run": "wings.runs",
    "record_step": "records.step_record",
    "validate": "own.validator",
    "watch": "core.observe.watching",
    "write_record": "records.step_record",
}

__all__ = [
    "Case",
    "Contract",
    "PipelineSchedule",
    "SimulatedWorld",
    "SingleDevice",
    "StageByStage",
    "StepResult",
    "Verdict",
    "World",
    "check_step",
    "errors",
    "log_verdict",
    "record_run",
    "record_step",
    "validate",
    "watch",
    "whitebox",
    "write_record",
]


def __getattr__(name: str) -> Any:
    if name in ("errors", "whitebox"):
        return importlib.import_module(f"pipeproof.{name}")
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("pipeproof")
    if name in _HOMES:
        return getattr(importlib.import_module(f"pipeproof.{_HOMES[name]}"), name)
    if (adapter := importlib.import_module("pipeproof.extensions").extension("adapters", name)) is not None:
        return adapter
    raise AttributeError(f"module 'pipeproof' has no attribute {name!r}")
