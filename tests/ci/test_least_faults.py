"""The smallest faults: each changes what it says, by as much as it says, and nothing else."""

import pytest
import torch
from least_faults import FAULTS, Step, Total

from pipeproof.core.tolerance import error
from pipeproof.own.stages import owners
from pipeproof.reference.data import IGNORED, Shapes, microbatches
from pipeproof.reference.model import DTYPES, build_model
from pipeproof.reference.step import Recipe, Reference, Site

COUNT = 3
ALONE = {fault.name: fault for fault in FAULTS}


def step(model: str, dtype: str = "fp64") -> Step:
    built = build_model(model, layers=2, seed=0, dtype=dtype)
    owner, recipe = owners(built, (1, 1)), Recipe(loss="tokens")
    batches = microbatches(model, count=COUNT, shapes=Shapes(unequal=True), seed=0)
    return Step(Reference(built, owner=owner, recipe=recipe), owner, [b.cast(DTYPES[dtype]) for b in batches], recipe)


def changed(total: Total, right: Total) -> set[Site]:
    return {site for site, gradient in right.items() if gradient is not None and not torch.equal(total[site], gradient)}


@pytest.mark.parametrize("model", ["mlp", "gpt-tied", "dropout", "pair"])
def test_every_variant_of_every_fault_changes_something_and_leaves_what_is_right_alone(model: str) -> None:
    one = step(model)
    before = {site: None if g is None else g.clone() for site, g in one.right.items()}
    for fault in FAULTS:
        for total in fault.totals(one):
            assert total.keys() == one.right.keys(), fault.name
            assert changed(total, before), fault.name
    assert not changed(one.right, before)


def test_one_token_weighs_too_much_by_a_4096th_of_its_own_gradient() -> None:
    one = step("gpt")
    wrong = next(ALONE["token weight"].totals(one))
    batch, model = one.batches[0], one.reference.model
    target = torch.full_like(batch.target, IGNORED)
    target[0, 0] = batch.target[0, 0]
    loss = model.sum_loss(model(*batch.inputs), target) / sum(batch.tokens for batch in one.batches)
    name = "blocks.0.up.weight"
    (gradient,) = torch.autograd.grad(loss, [model.get_parameter(name)])
    difference = wrong[0, name] - one.right[0, name]
    assert error(difference * 4096, gradient) < 1e-9


def test_a_divisor_of_one_token_too_many_scales_everything() -> None:
    one = step("mlp")
    (wrong,) = ALONE["divisor"].totals(one)
    tokens = sum(batch.tokens for batch in one.batches)
    for site in one.right:
        assert error(wrong[site] * (tokens + 1) / tokens, one.right[site]) < 1e-12


@pytest.mark.parametrize(
    ("name", "count", "sites"),
    [("LayerNorm drop", 2 * COUNT, {(0, "blocks.0.norm.weight"), (0, "blocks.0.norm.bias")}), ("drop", COUNT, None)],
)
def test_a_lost_microbatch_is_missing_where_it_is_said(name: str, count: int, sites: set[Site] | None) -> None:
    one = step("mlp")
    variants = list(ALONE[name].totals(one))
    assert len(variants) == count
    for microbatch, wrong in enumerate(variants[:COUNT]):
        assert changed(wrong, one.right) == (sites or {*one.right})
        for site in sites or one.right:
            assert error(wrong[site] + one.contributions[microbatch].gradients[site], one.right[site]) < 1e-12


@pytest.mark.parametrize("name", ["boundary bf16", "sum bf16"])
def test_a_rounding_to_bf16_is_one_and_in_bf16_itself_none(name: str) -> None:
    one = step("mlp", "fp32")
    sizes = [max(error(t[site], one.right[site]) for site in one.right) for t in ALONE[name].totals(one)]
    assert all(2**-16 < size < 2**-5 for size in sizes)
    narrow = step("mlp", "bf16")
    assert not any(changed(total, narrow.right) for total in ALONE[name].totals(narrow))


def test_a_sum_in_bf16_is_that_of_one_stage() -> None:
    one = step("mlp", "fp32")
    stages = [{stage for stage, _ in changed(total, one.right)} for total in ALONE["sum bf16"].totals(one)]
    assert stages == [{0}, {1}]
