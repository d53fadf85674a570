"""A tensor that went through a narrower type is told; one that was changed otherwise is not."""

import pytest
import torch
from torch import Tensor

from pipeproof.core.observe.sketch import sketch
from pipeproof.explain.rounding import find_rounding
from pipeproof.explain.sketches import is_rounded_sketch

WHOLE = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)) * 1e-2


@pytest.mark.parametrize(("observed", "name"), [(WHOLE.bfloat16().float(), "bf16"), (WHOLE.half().float(), "fp16")])
def test_a_narrower_type_is_told(observed: Tensor, name: str) -> None:
    assert find_rounding(observed, WHOLE) == name


@pytest.mark.parametrize(
    "observed",
    [
        WHOLE,
        WHOLE * 1.001,
        WHOLE + 1e-5 * torch.randn(WHOLE.shape, generator=torch.Generator().manual_seed(1)),
        torch.where(WHOLE > 0, WHOLE, 0.0),
        WHOLE.flip(0).half().float(),  # rounded, and more than that
        WHOLE.clamp(-1e-3, 1e-3),
        (WHOLE * 300).half().float() / 300,
    ],
    ids=["same", "scaled", "noise", "half of it", "another", "clamped", "scale"],
)
def test_other_changes_are_no_rounding(observed: Tensor) -> None:
    assert not find_rounding(observed, WHOLE)


def test_a_few_coarse_numbers_that_a_narrower_type_holds_by_chance_are_not_rounded() -> None:
    """Sums of bf16 have few digits: all of 16 may be in a narrower type, and one that is expected may not."""
    observed = torch.arange(16.0) + 16.25
    expected = observed + torch.tensor([2.0**-9, *[0.0] * 15])
    assert not find_rounding(observed, expected)
    assert find_rounding(observed, expected + 2.0**-9) == "bf16"


def test_fp32_is_a_narrower_type_of_fp64_alone() -> None:
    whole = WHOLE.double() / 3
    assert find_rounding(whole.float().double(), whole) == "fp32"
    assert not find_rounding(whole.float().double() * (1 + 1e-12), whole)
    observed, expected = sketch(whole.float().double()), sketch(whole)
    assert is_rounded_sketch(observed, expected)
    assert not sketch(WHOLE).narrow


def test_one_value_that_is_there_often_is_no_rounding() -> None:
    """As of a norm's weights, all of which were ones, and had something added."""
    assert not find_rounding(torch.full((64,), 1.1), torch.ones(64))
