"""A device is asked how it rounds products of fp32, whatever it was told by which of torch's settings."""

from collections.abc import Iterator

import pytest
import torch

from pipeproof.reference.products import CONVOLUTION, MATRICES, products_in, sort_of
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
