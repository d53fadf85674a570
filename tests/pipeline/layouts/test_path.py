"""One kind of parallelism at a time, with the reason."""

from pipeproof.pipeline.layouts.cluster import ACCELERATORS, Cluster
from pipeproof.pipeline.layouts.layout import Job
from pipeproof.pipeline.layouts.path import Outcome, Step, path
from pipeproof.pipeline.layouts.search import Allowed
from pipeproof.pipeline.layouts.transformer import MODELS

TAKEN, NOT_ENOUGH, NOT_NEEDED = Outcome


def steps(model: str, devices: int, *, batch: int = 512, sequence: int = 8192) -> dict[str, Step]:
    cluster = Cluster(ACCELERATORS["h100"], devices)
    return {step.name: step for step in path(Job(MODELS[model], batch, sequence), cluster, Allowed())}


def test_a_model_that_fits_needs_nothing_but_replicas() -> None:
    found = steps("gpt-1.7b", 8, sequence=2048)
    assert found["one device"].outcome is TAKEN
    assert found["data parallel"].outcome is TAKEN
    assert "8 devices are 8 times as fast as 1" in found["data parallel"].reason
    others = [step for name, step in found.items() if name not in ("one device", "data parallel")]
    assert {step.outcome for step in others} == {NOT_NEEDED}


def test_a_pipeline_is_avoided_where_all_fits_without_it() -> None:
    found = steps("llama-3-8b", 8)
    assert found["data parallel"].outcome is NOT_ENOUGH
    assert found["ZeRO-1"].outcome is TAKEN
    assert found["pipeline parallel"].outcome is NOT_NEEDED
    assert found["pipeline parallel"].reason.startswith("all fits without it, and ")


def test_the_largest_model_takes_tensor_parallelism_and_a_pipeline() -> None:
    found = steps("llama-3-405b", 16384, batch=2048)
    assert found["ZeRO-3"].reason == "2,048 sequences cannot be dealt out to 16,384 devices"
    assert found["tensor parallel"].outcome is TAKEN
    last = found["pipeline parallel"]
    assert last.outcome is TAKEN
    assert last.choice is not None
    assert (last.choice.layout.tp, last.choice.layout.pp) == (8, 16)


def test_long_sequences_and_experts_are_tried_where_they_are() -> None:
    assert "has no experts" in steps("llama-3-8b", 8)["expert parallel"].reason
    assert "is not long" in steps("llama-3-8b", 8)["context parallel"].reason
    assert steps("llama-3-8b", 32, batch=64, sequence=131072)["context parallel"].outcome is TAKEN
    assert steps("mixtral-8x7b", 64)["expert parallel"].choice is not None
