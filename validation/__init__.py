"""pipeproof: a pipeline schedule must not change the answer.

``Case`` says what to run, ``World`` where, ``validate`` gives the ``Verdict``. ``PipelineSchedule`` runs any of
``pipeproof.pipeline``'s schedules on your ranks. ``whitebox.validate`` judges your own step, ``check_step`` a step of a
running job by a record that ``record_step`` and ``write_record`` made, or by a ``SingleDevice`` beside it.
``record_run`` keeps what tells two runs of many steps apart. ``megatron`` and the other adapters stand here, too. All
load when first used, so that a command that needs no torch does not wait for it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pipeproof.whitebox as whitebox
    from pipeproof.core.contract import Contract as Contract
    from pipeproof.core.contract import ContractError as ContractError
    from pipeproof.core.verdict import NoVerdict as NoVerdict
    from pipeproof.core.verdict import PipelineMismatch as PipelineMismatch
    from pipeproof.core.verdict import ValidationFailed as ValidationFailed
    from pipeproof.core.verdict import Verdict as Verdict
    from pipeproof.own.case import Case as Case
    from pipeproof.own.case import CaseError as CaseError
    from pipeproof.own.validator import validate as validate
    from pipeproof.pipeline.action import ScheduleError as ScheduleError
    from pipeproof.pipeline.step import PipelineSchedule as PipelineSchedule
    from pipeproof.records.record import RecordError as RecordError
    from pipeproof.records.single_device import SingleDevice as SingleDevice
    from pipeproof.records.step_check import check_step as check_step
    from pipeproof.records.step_record import record_step as record_step
    from pipeproof.records.step_record import write_record as write_record
    from pipeproof.whitebox.task import WhiteBoxError as WhiteBoxError
    from pipeproof.wings.adapters import colossalai as colossalai
    from pipeproof.wings.adapters import deepspeed as deepspeed
    from pipeproof.wings.adapters import megatron as megatron
    from pipeproof.wings.adapters import nanotron as nanotron
    from pipeproof.wings.adapters import torchtitan as torchtitan
    from pipeproof.wings.adapters import transformers as transformers
    from pipeproof.wings.composed import Composed as Composed
    from pipeproof.wings.runs import record_run as record_run
    from pipeproof.wings.simulated import SimulatedWorld as SimulatedWorld
    from pipeproof.worlds.rank_report import NeedsMoreRanks as NeedsMoreRanks
    from pipeproof.worlds.rank_report import RankFailed as RankFailed
    from pipeproof.worlds.world import World as World

_HOMES = {
    "Case": "own.case",
    "Composed": "wings.composed",
    "CaseError": "own.case",
    "Contract": "core.contract",
    "ContractError": "core.contract",
    "NeedsMoreRanks": "worlds.rank_report",
    "NoVerdict": "core.verdict",
    "PipelineMismatch": "core.verdict",
    "PipelineSchedule": "pipeline.step",
    "RankFailed": "worlds.rank_report",
    "RecordError": "records.record",
    "ScheduleError": "pipeline.action",
    "SimulatedWorld": "wings.simulated",
    "SingleDevice": "records.single_device",
    "ValidationFailed": "core.verdict",
    "Verdict": "core.verdict",
    "WhiteBoxError": "whitebox.task",
    "World": "worlds.world",
    "check_step": "records.step_check",
    "page": "reports.page.page",
    "record_run": "wings.runs",
    "record_step": "records.step_record",
    "validate": "own.validator",
    "write_record": "records.step_record",
}

__all__ = [
    "Case",
    "CaseError",
    "Composed",
    "Contract",
    "ContractError",
    "NeedsMoreRanks",
    "NoVerdict",
    "PipelineMismatch",
    "PipelineSchedule",
    "RankFailed",
    "RecordError",
    "ScheduleError",
    "SimulatedWorld",
    "SingleDevice",
    "ValidationFailed",
    "Verdict",
    "WhiteBoxError",
    "World",
    "check_step",
    "colossalai",
    "deepspeed",
    "megatron",
    "nanotron",
    "record_run",
    "record_step",
    "torchtitan",
    "transformers",
    "validate",
    "whitebox",
    "write_record",
]


def __getattr__(name: str) -> Any:
    if name == "whitebox":
        return importlib.import_module("pipeproof.whitebox")
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("pipeproof")
    if name in _HOMES:
        return getattr(importlib.import_module(f"pipeproof.{_HOMES[name]}"), name)
    if (adapter := importlib.import_module("pipeproof.extensions").extension("adapters", name)) is not None:
        return adapter
    raise AttributeError(f"module 'pipeproof' has no attribute {name!r}")
