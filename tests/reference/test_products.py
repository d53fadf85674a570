"""A device is asked how it rounds products of fp32, whatever it was told by which of torch's settings."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pipeproof.reference.products import CONVOLUTION, MATRICES, products_in, settings_off, sort_of
from tests.support.rounded_products import Rounded

EVERY = [MATRICES, CONVOLUTION]


@pytest.fixture(autouse=True)
def the_same_numbers() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before), "the job's own are drawn by nobody else"


@pytest.mark.parametrize(("bits", "name"), [(23, "fp32"), (10, "TF32"), (7, "bf16")])
@pytest.mark.parametrize("sort", EVERY)
def test_each_sort_is_as_the_device_makes_it(sort: str, bits: int, name: str) -> None:
    with Rounded(bits, only=sort):
        found = products_in("cpu", EVERY)
    assert found == {MATRICES: "fp32", CONVOLUTION: "fp32"} | {sort: name}


def test_autocast_and_a_device_that_cannot_be_asked_change_nothing() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert products_in("cpu", EVERY) == {MATRICES: "fp32", CONVOLUTION: "fp32"}
    assert products_in("meta", EVERY) == {MATRICES: "fp32", CONVOLUTION: "fp32"}
    assert products_in("cpu", []) == {}


def test_products_are_told_from_other_operators() -> None:
    aten = torch.ops.aten
    made = {
        MATRICES: [aten.mm.default, aten.addmm.default, aten.bmm.out, aten._scaled_dot_product_flash_attention.default],
        CONVOLUTION: [aten.convolution.default, aten.convolution_backward.default],
        "": [aten.add.Tensor, aten.mul.Tensor, aten.sum.default],
    }
    for sort, operators in made.items():
        assert [sort_of(one) for one in operators] == [sort] * len(operators)


def test_rates_and_betas_are_smaller_and_all_else_is_as_it_was() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.5, betas=(0.5, 0.25), weight_decay=0.0, amsgrad=True)
    before = copy.deepcopy(optimizer.param_groups[0])
    after = settings_off(optimizer, 0.5).param_groups[0]
    assert (after["lr"], after["betas"], after["eps"]) == (0.25, (0.25, 0.125), before["eps"] / 2)
    assert {name for name in before if name != "params" and after[name] != before[name]} == {"lr", "betas", "eps"}
    assert after["params"] == [weight]
    assert torch.equal(weight, torch.ones(2))


@pytest.mark.parametrize(("rate", "by", "found"), [(torch.tensor(0.5), 0.5, 0.25), (0.5, 0.0, 0.5)])
def test_a_tensor_is_another_one_and_by_nothing_it_is_as_it_was(rate: Tensor | float, by: float, found: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=rate)
    group = optimizer.param_groups[0]
    assert settings_off(optimizer, by).param_groups[0] is group
    assert (group["lr"], rate) == (found, 0.5)
