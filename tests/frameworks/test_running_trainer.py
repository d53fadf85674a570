"""A step of a running Trainer under pipeproof: right ones pass, faults are named, and the job goes on.

``ci/frameworks`` runs this in an environment that has transformers; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: ci/frameworks installs it")
pytest.importorskip("accelerate", reason="accelerate is not installed: ci/frameworks installs it")

from pipeproof import World
from tests.frameworks import hf_job
from tests.frameworks.fault import named, passed
from tests.frameworks.hf_job import FAULTS, Job

RIGHT = {
    "llama": (Job(), "fp32"),
    "three-microbatches": (Job(accumulation=3), "fp32"),
    "tied": (Job(tied=True), "fp32"),
    "not-clipped": (Job(max_norm=0.0), "fp32"),
    "bf16": (Job(dtype="bfloat16"), "bf16"),
    "ddp": (Job(ranks=2), "fp32"),
    "ddp-tied": (Job(ranks=2, tied=True), "fp32"),
}
NAMED = {
    "own-loss": ("scale", "rank 0, stage 0, microbatches 0, 1"),
    "clipped-early": ("scale", "rank 0, stage 0, microbatch 0"),
    "one-lost": ("dropped", "rank 0, stage 0, microbatch 1"),
    "not-cleared": ("stale-gradient", "rank 0, stage 0"),
    "gpt2-first-counted": ("scale", "rank 0, stage 0"),
    "never-synchronised": ("not-reduced", "stage 0"),
    "own-tokens": ("scale", "rank 0, stage 0, microbatches 0, 1, 2, 3"),
    "not-multiplied": ("scale", "rank 0, stage 0"),
}


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_passes_and_the_job_is_as_without_a_check(name: str, world: World) -> None:
    job, tier = RIGHT[name]
    for verdict, harmed in world.run(hf_job.checked_and_unchecked, job, ranks=job.ranks):
        assert (verdict.verdict, verdict.tier) == ("pass", tier), str(verdict)
        assert passed(verdict) >= {"gradient", "loss", "parameters-once", "grad-norm"}
        assert harmed == []


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", NAMED)
def test_a_fault_in_a_job_is_caught_and_named(name: str, world: World) -> None:
    job, (kind, place) = FAULTS[name][0], NAMED[name]
    for verdict in world.run(hf_job.checked, job, name, ranks=job.ranks):
        outcome, causes = named(verdict)
        assert (outcome, causes[:1]) == ("fail", [(kind, place)]), str(verdict)


@pytest.mark.pipeproof_ranks
def test_what_the_job_raises_is_its_own_and_the_trainer_is_as_it_was(world: World) -> None:
    ((raised, verdict, clean),) = world.run(hf_job.ended_early, Job(), ranks=1)
    assert (raised, clean) == ('KeyError("the job\'s own")', True)
    assert verdict.startswith("ERROR rank 0 raised KeyError")
