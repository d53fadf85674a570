"""Judging a case of a framework: its engine and its adapter are imported here, and nowhere before."""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType
from typing import Any

from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.worlds.world import World
from tests.frameworks.engines.framework_case import FrameworkCase

# The modules with a tiny model of a framework's, and a step of it.
TINY: Mapping[str, str] = MappingProxyType(
    {"megatron": "tiny_gpt", "deepspeed": "tiny_pipe", "torchtitan": "tiny_titan"}
)


def judged(case: FrameworkCase, world: World, **options: Any) -> Verdict:
    """The verdict on ``case``, run on ``world``'s ranks beside the reference, with its cause where it is no pass.

    ``options``: of the tiny model's ``judged``, as the step that tests put in place of the right one.
    """
    tiny: Any = import_module(f"tests.frameworks.engines.{TINY[case.framework]}")
    every = case.microbatches * case.layout.dp
    verdict: Verdict = tiny.judged(case.layout, microbatches=every, whitebox=WhiteBox(world), **options)
    rerun = f"LINE='{case}' ci/frameworks -k a_line_passes"
    return replace(verdict, config=str(case), bindings=case.bindings, rerun=rerun)
