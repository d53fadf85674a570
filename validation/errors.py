"""User-facing errors, each raised and defined in its own room."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeproof.core.contract import ContractError as ContractError
    from pipeproof.core.verdict import NoVerdict as NoVerdict
    from pipeproof.core.verdict import PipelineMismatch as PipelineMismatch
    from pipeproof.core.verdict import ValidationFailed as ValidationFailed
    from pipeproof.own.case import CaseError as CaseError
    from pipeproof.pipeline.action import ScheduleError as ScheduleError
    from pipeproof.records.record import RecordError as RecordError
    from pipeproof.whitebox.task import WhiteBoxError as WhiteBoxError
    from pipeproof.worlds.rank_report import NeedsMoreRanks as NeedsMoreRanks
    from pipeproof.worlds.rank_report import RankFailed as RankFailed

_HOMES = {
    "CaseError": "own.case",
    "ContractError": "core.contract",
    "NeedsMoreRanks": "worlds.rank_report",
    "NoVerdict": "core.verdict",
    "PipelineMismatch": "core.verdict",
    "RankFailed": "worlds.rank_report",
    "RecordError": "records.record",
    "ScheduleError": "pipeline.action",
    "ValidationFailed": "core.verdict",
    "WhiteBoxError": "whitebox.task",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"pipeproof.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pipeproof.errors' has no attribute {name!r}")
