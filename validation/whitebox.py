"""Steps of your own: ``validate`` judges one on real ranks, and ``mutate`` says what your own test of one tests.

All of it loads when first used: a rank needs no judge.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeproof.foreign import FlatShard as FlatShard
    from pipeproof.foreign import HandedBack as HandedBack
    from pipeproof.foreign import Operation as Operation
    from pipeproof.foreign import WhiteBox as WhiteBox
    from pipeproof.foreign import validate as validate
    from pipeproof.foreign import watch as watch
    from pipeproof.wings.mutate import LetPass as LetPass
    from pipeproof.wings.mutate import Mutated as Mutated
    from pipeproof.wings.mutate import mutate as mutate
    from pipeproof.wings.mutate import under_test as under_test

_HOMES = {
    "foreign": ("FlatShard", "HandedBack", "Operation", "WhiteBox", "validate", "watch"),
    "wings.mutate": ("LetPass", "Mutated", "mutate", "under_test"),
}

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"pipeproof.{home}"), name)
    raise AttributeError(f"module 'pipeproof.whitebox' has no attribute {name!r}")
