"""A step of a running Trainer under pipeproof: right ones pass, faults are named, and the job goes on.

``ci/frameworks`` runs this in an environment that has transformers; elsewhere it is skipped.
"""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: ci/frameworks installs it")
pytest.importorskip("accelerate", reason="accelerate is not installed: ci/frameworks installs it")

from pipeproof import World
from pipeproof.core.verdict import Verdict
from pipeproof.records.compare import RUNS, compare
from pipeproof.records.record_file import read
from tests.frameworks import hf_job, shared
from tests.frameworks.fault import named, passed
from tests.frameworks.hf_job import FAULTS as FAULTS
from tests.frameworks.hf_job import Job, job_of
from tests.frameworks.jobs import compared, recorded

pytestmark = pytest.mark.pipeproof_ranks

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
    "own-tokens": ("scale", "stage 0, microbatches 0, 1, 2, 3"),
    "not-multiplied": ("scale", "stage 0"),
}
LAWS = {"grad-norm": lambda _: True}
test_a_right_step_passes, test_a_fault_in_a_job_is_named = shared.OF_JOBS

RECORDED = {  # each beside one process that trains four microbatches
    "llama": Job(accumulation=4, checked=0),
    "tied": Job(accumulation=4, checked=0, tied=True),
    "ddp": Job(ranks=2, checked=0),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_step_is_that_of_one_device(name: str, world: World, tmp_path: Path) -> None:
    verdict = beside_one_device(RECORDED[name], "", world, tmp_path)
    assert (verdict.outcome, verdict.tier) == ("pass", "fp32"), str(verdict)
    assert passed(verdict) >= {"gradient", "loss", "parameters-once", "grad-norm"}
    assert verdict.law("loss").checked == 4


def beside_one_device(job: Job, fault: str, world: World, folder: Path) -> Verdict:
    path = str(folder / "expected.safetensors")
    world.run(hf_job.expected, replace(job, ranks=1, accumulation=job.ranks * job.accumulation), path, ranks=1)
    return compared(world, job_of, job, folder, read(path), fault)


def test_one_process_and_ddp_give_the_same_step(world: World, tmp_path: Path) -> None:
    one, two = Job(accumulation=4, checked=0, optimizer="sgd"), Job(ranks=2, checked=0, optimizer="sgd")
    paths = [str(tmp_path / f"{name}.safetensors") for name in ("one", "two")]
    for job, path in zip((one, two), paths, strict=True):
        assert world.run(recorded, job_of, job, path, ranks=job.ranks) == [""] * job.ranks
    verdict = compare(*map(read, paths), sides=RUNS)
    assert (verdict.outcome, verdict.tier) == ("pass", "fp32"), str(verdict)


RECORDED_FAULTS = {
    "not-multiplied": (Job(ranks=2, checked=0), [("scale", "stage 0")]),
    "clipped-early": (Job(checked=0), []),  # a record has sums alone
}


@pytest.mark.parametrize("name", RECORDED_FAULTS)
def test_a_fault_in_a_recorded_step_is_caught(name: str, world: World, tmp_path: Path) -> None:
    job, causes = RECORDED_FAULTS[name]
    verdict = beside_one_device(job, name, world, tmp_path)
    assert named(verdict) == ("fail", causes), str(verdict)


@pytest.mark.filterwarnings("ignore:the step was not recorded")
def test_a_step_that_never_came_is_said(world: World, tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    (problem,) = world.run(recorded, job_of, Job(checked=9, steps=3), str(path), ranks=1)
    assert problem == "the block took no step 9: call trainer.train in it, with max_steps above 9"
    assert not path.exists()


def test_what_the_job_raises_is_its_own_and_the_trainer_is_as_it_was(world: World) -> None:
    ((raised, verdict, clean),) = world.run(hf_job.ended_early, Job(checked=0), ranks=1)
    assert (raised, clean) == ('KeyError("the job\'s own")', True)
    assert verdict.startswith("ERROR rank 0 raised KeyError")
