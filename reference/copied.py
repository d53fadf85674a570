"""A deep copy of a model that may hold what cannot be copied."""

import copy
from traceback import walk_tb
from typing import TypeVar

from torch import nn

Value = TypeVar("Value")


def copied(value: Value) -> Value:
    """A deep copy of ``value``, which shares with it what cannot be copied: a process group, a lock, a module.

    Raises what ``deepcopy`` raises where that is a module or a parameter: what is done to the copy may not reach it.
    """
    shared: dict[int, object] = {}
    while True:
        try:
            return copy.deepcopy(value, dict(shared))
        except Exception as error:  # no one type: every object has its own way to refuse
            stuck = _uncopied(error)
            if stuck is value or id(stuck) in shared or isinstance(stuck, nn.Module | nn.Parameter):
                raise
            shared[id(stuck)] = stuck


def _uncopied(error: Exception) -> object:
    """The object at which ``deepcopy`` raised ``error``: the innermost that it was asked to copy."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code is copy.deepcopy.__code__]
    return frames[-1].f_locals["x"]
