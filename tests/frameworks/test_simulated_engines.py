"""Engines of frameworks on simulated ranks: right ones pass by the rules of gloo and NCCL, faults are caught.

``ci/frameworks`` runs this in an environment that has them; what is not installed is skipped.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import pytest

from pipeproof import SimulatedWorld
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.frameworks.engines.deepspeed_layout import DeepSpeedLayout
from tests.frameworks.engines.megatron_layout import MegatronLayout
from tests.frameworks.engines.torchtitan_layout import TorchtitanLayout

TITAN = TorchtitanLayout(schedule="Interleaved1F1B", vp=2)


@pytest.fixture(params=["gloo", "nccl"])
def simulated(request: pytest.FixtureRequest) -> Iterator[WhiteBox]:
    with SimulatedWorld(seed=1, transport=request.param, silent=True) as world:
        yield WhiteBox(world)


def of(framework: str, tiny: str, layout: Any, **options: Any) -> Callable[[WhiteBox], Verdict]:
    """The verdict on a tiny model of a framework's; skips where that is not installed."""

    def judged(whitebox: WhiteBox) -> Verdict:
        pytest.importorskip(framework, reason=f"{framework} is not installed: ci/frameworks installs it")
        module: Any = import_module(tiny)
        if fault := options.get("fault"):
            step = partial(import_module(f"tests.frameworks.{framework}_faults").step, fault)
            return module.judged(layout, own_step=step, whitebox=whitebox)  # type: ignore[no-any-return]
        return module.judged(layout, whitebox=whitebox)  # type: ignore[no-any-return]

    return judged


CASES = "tests.frameworks.engines"
RIGHT = {
    "megatron": of("megatron.core", f"{CASES}.tiny_gpt", MegatronLayout(dp=2)),
    "deepspeed": of("deepspeed", f"{CASES}.tiny_pipe", DeepSpeedLayout(dp=2)),
    "torchtitan": of("torchtitan", f"{CASES}.tiny_titan", TITAN),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_engine_passes(name: str, simulated: WhiteBox) -> None:
    verdict = RIGHT[name](simulated)
    assert verdict.outcome == "pass", str(verdict)
    assert simulated.world.own_modules == {name}


def test_a_fault_is_caught(simulated: WhiteBox) -> None:
    faults = pytest.importorskip("tests.frameworks.torchtitan_faults", exc_type=ImportError).FAULTS
    name, fault = next(iter(faults.items()))
    verdict = of("torchtitan", f"{CASES}.tiny_titan", fault.layout, fault=name)(simulated)
    assert (verdict.outcome, {one.kind for one in verdict.causes}) == ("fail", {fault.kind}), str(verdict)


def test_overlapped_sends_of_megatron_that_nobody_waits_for_are_named(simulated: WhiteBox) -> None:
    """A finding: gloo forgets a send whose work is dropped, and NCCL does not."""
    layout = MegatronLayout(vp=2, p2p_overlap=True)
    verdict = of("megatron.core", f"{CASES}.tiny_gpt", layout)(simulated)
    by_name = simulated.world.decision is not None and simulated.world.decision.transport.value == "unlimited"
    assert [one.kind for one in verdict.causes] == (["never-waited"] if by_name else []), str(verdict)
    assert verdict.outcome == ("fail" if by_name else "pass")
