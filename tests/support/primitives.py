"""A stack of primitives, or a step like one, judged; and what must hold of the verdict."""

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from torch import nn

from pipeproof.core.verdict import Verdict
from pipeproof.wings.primitives.stacked import reference_of
from pipeproof.wings.primitives.stacks import Stack

# ci/primitives stacks runs all with more
SEEDS = range(int(os.environ.get("PRIMITIVES_SEEDS", "1")))
Reference = Callable[[], nn.Module]
Step = Callable[..., Any]


def all_held(verdict: Verdict, stack: Stack, reference: Reference | None = None) -> bool:
    parameters = len(list((reference or reference_of(stack))().parameters()))
    laws = {verdict.law(name).checked for name in ("gradient", "parameters-once")}
    shared = verdict.law("replicas").checked + verdict.law("shards").checked > 0
    return laws == {parameters} and shared == bool(stack.sizes.keys() - {"pp"})


def is_caught(verdict: Verdict, causes: str, told: str) -> bool:
    """Whether ``verdict`` names these causes and no other, none where that is empty, and says what is ``told``."""
    named = {one.kind for one in verdict.causes} == set(causes.split())
    words = verdict.details.partition("  replay")[0]  # which has the name of the test, and so these words
    return verdict.outcome == "fail" and named and told in words


def planted(step: Step, at: str, fault: Callable[[Any], Any]) -> Step:
    """``step`` with ``fault(right)`` in place of what is right ``at``, such as ``experts.reduced``, on every rank.

    Where that is nowhere the whole step is what is right.
    """
    return partial(_planted, step, at, fault) if at else fault(step)


def _planted(step: Step, at: str, fault: Callable[[Any], Any], *given: Any) -> Any:
    file, *path, name = at.split(".")
    owner = importlib.import_module(f"pipeproof.wings.primitives.{file}")
    for each in path:
        owner = getattr(owner, each)
    wrong = fault(getattr(owner, name))
    with mock.patch.object(owner, name, staticmethod(wrong) if path else wrong):
        return step(*given)
