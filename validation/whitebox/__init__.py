"""Validate custom steps: ``validate`` compares results from real ranks with the reference.

``fuzz`` validates drawn cases: ranks, microbatches, splits, and further arguments of the step.
A wing may add names: ``mutate`` measures what a step's own test detects. All names load on first use: ranks need no
judge.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pipeproof.extensions import extension, names

if TYPE_CHECKING:
    from pipeproof.whitebox.fuzzing import FuzzResult as FuzzResult
    from pipeproof.whitebox.handed_back import FlatShard as FlatShard
    from pipeproof.whitebox.handed_back import Operation as Operation
    from pipeproof.whitebox.space import Campaign as Campaign
    from pipeproof.whitebox.space import StepCase as StepCase
    from pipeproof.whitebox.validator import WhiteBox as WhiteBox
    from pipeproof.whitebox.validator import fuzz as fuzz
    from pipeproof.whitebox.validator import validate as validate

_HOMES = {
    "Campaign": "whitebox.space",
    "FlatShard": "whitebox.handed_back",
    "FuzzResult": "whitebox.fuzzing",
    "Operation": "whitebox.handed_back",
    "StepCase": "whitebox.space",
    "WhiteBox": "whitebox.validator",
    "fuzz": "whitebox.validator",
    "validate": "whitebox.validator",
}

__all__ = [*_HOMES, *names("whitebox")]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"pipeproof.{_HOMES[name]}"), name)
    if name in names("whitebox"):
        return extension("whitebox", name)
    raise AttributeError(f"module 'pipeproof.whitebox' has no attribute {name!r}")
