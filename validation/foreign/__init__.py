"""Judging a training step that is not ours: it runs on real ranks beside the reference and hands back what it made.

All of it loads when first used: a rank needs no judge.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeproof.foreign.handed_back import FlatShard as FlatShard
    from pipeproof.foreign.handed_back import HandedBack as HandedBack
    from pipeproof.foreign.on_a_world import validate as validate
    from pipeproof.foreign.operations import Operation as Operation
    from pipeproof.foreign.validator import WhiteBox as WhiteBox
    from pipeproof.observers.watching import watch as watch

_HOMES = {
    "FlatShard": "foreign.handed_back",
    "HandedBack": "foreign.handed_back",
    "Operation": "foreign.operations",
    "WhiteBox": "foreign.validator",
    "validate": "foreign.on_a_world",
    "watch": "observers.watching",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"pipeproof.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pipeproof.foreign' has no attribute {name!r}")
