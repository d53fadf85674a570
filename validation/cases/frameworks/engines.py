"""Running a case of a framework: its engine and its adapter are imported here, and nowhere before."""

import importlib
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol

from pipeproof.cases.frameworks.framework_case import FrameworkCase
from pipeproof.cases.frameworks.framework_layout import FrameworkLayout
from pipeproof.foreign import WhiteBox
from pipeproof.foreign.frameworks.deepspeed_whole import DEEPSPEED
from pipeproof.foreign.frameworks.framework import Framework
from pipeproof.foreign.frameworks.megatron_whole import MEGATRON
from pipeproof.foreign.frameworks.torchtitan_whole import TORCHTITAN
from pipeproof.judging.verdict import Verdict
from pipeproof.worlds.world import World

_KNOWN = MappingProxyType({"megatron": MEGATRON, "deepspeed": DEEPSPEED, "torchtitan": TORCHTITAN})
_TINY = MappingProxyType({"megatron": "tiny_gpt", "deepspeed": "tiny_pipe", "torchtitan": "tiny_titan"})


class Engine(Protocol):
    """A module with a tiny model of a framework's, and a step of it."""

    def judged(
        self, layout: Any, *, microbatches: int, own_step: Callable[..., Any] = ..., whitebox: WhiteBox | None
    ) -> Verdict:
        """The verdict on a step of so many microbatches, those of all replicas."""


def installed(framework: str) -> str:
    """Its name and version. Raises what its adapter raises where it is missing, or of a version that is not known."""
    known: Framework = _KNOWN[framework]
    with redirect_stdout(sys.stderr):  # on which DeepSpeed's log begins; standard output is the command's
        return f"{known.name} {known.module().__version__}"


@cache
def engine(framework: str) -> Engine:
    """The module that runs its cases; raises as ``installed`` does."""
    installed(framework)
    with redirect_stdout(sys.stderr):
        found: Any = importlib.import_module(f"{__package__}.{_TINY[framework]}")
    return found  # type: ignore[no-any-return]  # a module is what the protocol asks for


def judged(case: FrameworkCase, world: World, **options: Any) -> Verdict:
    """The verdict on ``case``, run on ``world``'s ranks beside the reference, with its cause where it is no pass.

    ``options``: of the engine's ``judged``, as the step that tests put in place of the right one.
    """
    layout: FrameworkLayout = case.layout
    every = case.microbatches * layout.dp
    verdict = engine(case.framework).judged(layout, microbatches=every, whitebox=WhiteBox(world), **options)
    return replace(verdict, config=str(case), bindings=case.bindings, rerun="")
