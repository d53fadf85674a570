"""Validation: schedules on real ranks held against the reference, law by law.

``Case`` says what to run, ``World`` where, ``validate`` gives the ``Verdict``. ``check_step`` judges a step of a
running job by a record that ``record_step`` and ``write_record`` made, or by a ``SingleDevice`` beside it. They load
when first used, so that a command that needs no torch does not wait for it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import validation.foreign as whitebox
    from validation.cases.case import Case as Case
    from validation.cases.validator import validate as validate
    from validation.judging.verdict import Verdict as Verdict
    from validation.records.single_device import SingleDevice as SingleDevice
    from validation.records.step_check import check_step as check_step
    from validation.records.step_record import record_step as record_step
    from validation.records.step_record import write_record as write_record
    from validation.worlds.world import World as World

_HOMES = {
    "Case": "cases.case",
    "SingleDevice": "records.single_device",
    "Verdict": "judging.verdict",
    "World": "worlds.world",
    "check_step": "records.step_check",
    "record_step": "records.step_record",
    "validate": "cases.validator",
    "write_record": "records.step_record",
}

__all__ = [
    "Case",
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
        return importlib.import_module("validation.foreign")
    if name in _HOMES:
        return getattr(importlib.import_module(f"validation.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'validation' has no attribute {name!r}")
