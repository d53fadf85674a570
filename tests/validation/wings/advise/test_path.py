"""One kind of parallelism at a time, with the reason."""

from dataclasses import replace

import pytest

from pipeproof.wings.advise.cluster import ACCELERATORS, GIB, Cluster
from pipeproof.wings.advise.layout import Job, Recompute
from pipeproof.wings.advise.path import Outcome, Step, find_path
from pipeproof.wings.advise.search import Allowed
from pipeproof.wings.advise.transformer import MODELS
from tests.support.golden import golden

TAKEN, NOT_ENOUGH, NOT_NEEDED = Outcome


def steps(model: str, devices: int, *, batch: int = 512, sequence: int = 8192) -> dict[str, Step]:
    cluster = Cluster(ACCELERATORS["h100"], devices)
    return {step.name: step for step in find_path(Job(MODELS[model], batch, sequence), cluster, Allowed())}


def test_a_model_that_fits_needs_nothing_but_replicas() -> None:
    found = steps("gpt-1.7b", 8, sequence=2048)
    assert found["one device"].outcome is TAKEN
    assert found["data parallel"].outcome is TAKEN
    golden(found["data parallel"].reason)
    others = [step for name, step in found.items() if name not in ("one device", "data parallel")]
    assert {step.outcome for step in others} == {NOT_NEEDED}


@pytest.mark.long
def test_a_pipeline_is_avoided_where_all_fits_without_it() -> None:
    found = steps("llama-3-8b", 8)
    assert found["data parallel"].outcome is NOT_ENOUGH
    assert found["ZeRO-1"].outcome is TAKEN
    assert found["pipeline parallel"].outcome is NOT_NEEDED
    assert found["pipeline parallel"].reason.startswith("fits without it; ")


@pytest.mark.long
def test_the_largest_model_takes_tensor_parallelism_and_a_pipeline() -> None:
    found = steps("llama-3-405b", 16384, batch=2048)
    golden(found["ZeRO-3"].reason)
    assert found["tensor parallel"].outcome is TAKEN
    last = found["pipeline parallel"]
    assert last.outcome is TAKEN
    assert (last.choice.layout.tp, last.choice.layout.pp) == (8, 16)


def test_a_step_that_no_layout_can_take_says_what_its_ranks_would_share() -> None:
    found = steps("llama-3-8b", 7)
    golden(found["data parallel"].reason)
    golden(found["tensor parallel"].reason)
    golden(found["recompute"].reason)


@pytest.mark.long
def test_long_sequences_and_experts_are_tried_where_they_are() -> None:
    assert "has no experts" in steps("llama-3-8b", 8)["expert parallel"].reason
    golden(steps("llama-3-8b", 8)["context parallel"].reason)
    assert steps("llama-3-8b", 32, batch=64, sequence=131072)["context parallel"].outcome is TAKEN
    assert steps("mixtral-8x7b", 64)["expert parallel"].choice is not None


def test_one_device_is_offered_nothing_that_needs_more() -> None:
    found = steps("gpt-1.7b", 1, sequence=2048)
    assert found["one device"].outcome is TAKEN
    others = [step for name, step in found.items() if not name.endswith("one device")]
    (reason,) = {step.reason for step in others}
    golden(reason)


def test_more_devices_that_are_slower_are_not_taken() -> None:
    device = replace(ACCELERATORS["h100"], network=1e7)
    found = {one.name: one for one in find_path(Job(MODELS["gpt-1.7b"], 8, 2048), Cluster(device, 8, 1), Allowed())}
    assert found["data parallel"].outcome is NOT_NEEDED
    golden(found["data parallel"].reason)


def test_what_is_there_is_what_may_be_filled() -> None:
    """72.5 of 80 GiB look as if they fitted."""
    reason = steps("llama-3-8b", 2, sequence=4096)["ZeRO-3"].reason
    golden(reason)


def test_what_is_not_allowed_is_no_step() -> None:
    found = find_path(
        Job(MODELS["gpt-1.7b"], 64, 2048), Cluster(ACCELERATORS["h100"], 8), Allowed(recompute=(Recompute.NONE,))
    )
    assert not [step.name for step in found if "recompute" in step.name]


def test_a_step_that_changes_nothing_repeats_no_figures() -> None:
    found = steps("gpt-1.7b", 8, sequence=2048)
    assert [name for name, step in found.items() if step.choice] == ["one device", "data parallel"]


@pytest.mark.parametrize("model", ["gpt-1.7b", "mixtral-8x7b"])
@pytest.mark.parametrize("gib", [1, 40])
def test_a_step_shows_a_layout_of_its_own_kind_or_none(model: str, gib: int) -> None:
    device = replace(ACCELERATORS["h100"], memory=gib * GIB)
    found = {one.name: one for one in find_path(Job(MODELS[model], 512, 4096), Cluster(device, 8), Allowed())}
    for name, axis in (("tensor", "tp"), ("pipeline", "pp"), ("expert", "ep")):
        choice = found[f"{name} parallel"].choice
        assert choice is None or getattr(choice.layout, axis) > 1
    if (model, gib) == ("gpt-1.7b", 1):
        assert found["tensor parallel"].reason.startswith("needs 3.7 GiB; ")
        assert found["pipeline parallel"].choice is None
        golden(found["pipeline parallel"].reason)
