"""Steps of your own: ``validate`` judges one on real ranks beside the reference, by what it hands back.

A wing may give more names: ``mutate`` says what your own test of a step tests. All of it loads when first used: a rank
needs no judge.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pipeproof.extensions import extension, names

if TYPE_CHECKING:
    from pipeproof.core.observe.watching import watch as watch
    from pipeproof.whitebox.handed_back import FlatShard as FlatShard
    from pipeproof.whitebox.handed_back import HandedBack as HandedBack
    from pipeproof.whitebox.handed_back import Operation as Operation
    from pipeproof.whitebox.validator import WhiteBox as WhiteBox
    from pipeproof.whitebox.validator import validate as validate

_HOMES = {
    "FlatShard": "whitebox.handed_back",
    "HandedBack": "whitebox.handed_back",
    "Operation": "whitebox.handed_back",
    "WhiteBox": "whitebox.validator",
    "validate": "whitebox.validator",
    "watch": "core.observe.watching",
}

__all__ = [*_HOMES, *names("whitebox")]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"pipeproof.{_HOMES[name]}"), name)
    if name in names("whitebox"):
        return extension("whitebox", name)
    raise AttributeError(f"module 'pipeproof.whitebox' has no attribute {name!r}")
