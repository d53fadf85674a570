"""A step of a running job of nanotron's under pipeproof: right ones pass, faults are named, and the job goes on.

``ci/frameworks`` runs this in an environment that has nanotron; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("nanotron", reason="nanotron is not installed: ci/frameworks installs it from NANOTRON, a checkout")

from pathlib import Path

from pipeproof import World
from pipeproof.records.compare import compare
from pipeproof.records.record_file import read
from tests.frameworks import llama_job
from tests.frameworks.fault import named
from tests.frameworks.jobs import assert_named, assert_right, recorded
from tests.frameworks.llama_job import job_of
from tests.frameworks.nanotron_faults import FAULTS, SUMS
from tests.frameworks.tiny_llama import Layout

pytestmark = pytest.mark.pipeproof_ranks

RIGHT = {
    "1f1b": (Layout(), "fp32"),
    "afab-tied": (Layout(engine="afab", tied=True), "fp32"),
    "summed-in-fp32": (SUMS, "bf16"),
    "replicas-ddp-tied-zero-1": (Layout(dp=2, zero=1, tied=True), "fp32"),
    "unclipped": (Layout(clip=None), "bitwise"),
}
NAMED = {  # what the step's numbers alone tell: no messages between stages are observed
    "not-divided": ("scale", "everywhere"),
    "tied-not-synced": FAULTS["tied-not-synced"],
    "tied-averaged": FAULTS["tied-averaged"],
    "replicas-not-synced": ("not-reduced", "stage 0"),
    "replicas-summed": ("scale", "everywhere"),
    "norm-of-one-stage": ("norm", "everywhere"),
    "norm-counts-copies": ("norm", "everywhere"),
    "last-in-first-out": ("swapped-gradients", "rank 0, stage 0, microbatches 0, 1, 2, 3"),
    "half-kept": ("doubled", "microbatches 0, 1, 2"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_passes_and_the_job_is_as_without_a_check(name: str, world: World) -> None:
    layout, tier = RIGHT[name]
    norm = set() if layout.clip is None else {"grad-norm"}
    assert_right(world, job_of, layout, tier, {"gradient", "loss", "parameters-once"} | norm)


@pytest.mark.parametrize("fault", NAMED)
def test_a_fault_in_a_job_is_caught_and_named(fault: str, world: World) -> None:
    said = NAMED[fault]
    cause = said if isinstance(said, tuple) else (said.kind, said.places[0])
    assert_named(world, job_of, FAULTS[fault].layout, fault, cause)


def test_what_afab_keeps_of_a_step_that_raised_is_found_in_the_next(world: World) -> None:
    """Nothing is planted: nanotron's queues are of the class, and outlive a step."""
    for verdict in world.run(llama_job.tried_again, Layout(engine="afab"), ranks=2):
        assert named(verdict) == ("fail", [("doubled", "microbatches 0, 1")]), str(verdict)


def test_gradients_that_were_not_cleared_are_found_in_the_next_step(world: World) -> None:
    for verdict in world.run(llama_job.not_cleared, SUMS, ranks=2):
        assert verdict.outcome == "fail", str(verdict)
        assert [cause.kind for cause in verdict.causes] == ["stale-gradient"], str(verdict)


def test_what_is_no_trainer_is_said_and_the_job_goes_on(world: World) -> None:
    for said, trained in world.run(llama_job.refused, Layout(), ranks=2):
        assert "the trainer is a str without model: expected nanotron's DistributedTrainer" in said
        assert trained


def test_two_recorded_steps_are_compared(world: World, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in ("1f1b", "afab")]
    for path in paths:
        world.run(recorded, job_of, Layout(engine=path.stem), str(path), ranks=2)
    verdict = compare(*map(read, map(str, paths)))
    assert verdict.outcome == "pass", str(verdict)
