"""A fault in a primitive: for the length of a step, a function of the right implementation is another one."""

import functools
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

Step = Callable[..., Any]


def planted(step: Step, at: str, fault: Callable[[Any], Any]) -> Step:
    """``step`` with ``fault(right)`` in place of what is right ``at``, such as ``experts.reduced``, on every rank."""
    return functools.partial(_planted, step, at, fault)


def _planted(step: Step, at: str, fault: Callable[[Any], Any], *given: Any) -> Any:
    file, *path, name = at.split(".")
    owner = importlib.import_module(f"pipeproof.wings.primitives.{file}")
    for each in path:
        owner = getattr(owner, each)
    wrong = fault(getattr(owner, name))
    with mock.patch.object(owner, name, staticmethod(wrong) if path else wrong):
        return step(*given)
