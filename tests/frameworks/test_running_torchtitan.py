"""A step of a running job of torchtitan's under pipeproof: right ones pass, faults are named, and the job goes on.

``ci/frameworks`` runs this in an environment that has torchtitan; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: ci/frameworks installs it")

from pipeproof import World
from tests.frameworks import titan_job
from tests.frameworks.tiny_titan import Layout
from tests.frameworks.torchtitan_faults import FAULTS

RIGHT = {
    "1f1b": (Layout(clipped=False), "bitwise"),
    "1f1b-clipped": (Layout(), "fp32"),
    "interleaved": (Layout(schedule="Interleaved1F1B"), "fp32"),
    "zb-v": (Layout(schedule="ZBVZeroBubble", clipped=False), "bitwise"),
    "fsdp": (Layout(dp=2), "fp32"),
    "replicated": (Layout(replicate=2), "fp32"),
}


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_passes_and_the_job_is_as_without_a_check(name: str, world: World) -> None:
    layout, tier = RIGHT[name]
    for verdict, harmed in world.run(titan_job.checked_and_unchecked, layout, ranks=layout.pp * layout.ranks["dp"]):
        assert (verdict.verdict, verdict.tier) == ("pass", tier), str(verdict)
        assert {law.name for law in verdict.laws if law.outcome == "pass"} >= {"gradient", "loss", "parameters-once"}
        assert (verdict.law("grad-norm").outcome == "pass") == layout.clipped
        assert harmed == []
