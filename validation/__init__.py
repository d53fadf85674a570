"""Validation: schedules on real ranks held against the reference, law by law.

``Case`` says what to run, ``World`` where, ``validate`` gives the ``Verdict``. They load when first used, so that a
command that needs no torch does not wait for it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from validation.case import Case as Case
    from validation.validator import validate as validate
    from validation.verdict import Verdict as Verdict
    from validation.world import World as World

_HOMES = {"Case": "case", "Verdict": "verdict", "World": "world", "validate": "validator"}

__all__ = ["Case", "Verdict", "World", "validate"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"validation.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'validation' has no attribute {name!r}")
