"""A tensor that went through a narrower type is told, at any scale; one that was changed otherwise is not."""

import pytest
import torch
from torch import Tensor

from pipeproof.explain.rounding import added_up_in, rounded_as
from pipeproof.explain.sketches import is_rounded_sketch
from pipeproof.observers.likeness import Likeness
from pipeproof.observers.sketch import sketch

WHOLE = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)) * 1e-2


def told(seen: Tensor, whole: Tensor) -> str | None:
    found = rounded_as(seen, whole)
    return None if found is None else Likeness("rounded", narrow=found.narrow, step=found.step).text


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (WHOLE.bfloat16().float(), "bf16-rounded"),
        (WHOLE.half().float(), "fp16-rounded"),
        ((WHOLE * 300).half().float() / 300, "fp16-rounded at some other scale"),
        ((WHOLE * 3).bfloat16().float() / 3, "bf16-rounded at some other scale"),
        ((WHOLE * 1e-3).half().float() * 1e3, "rounded to multiples of 5.96e-05"),
        ((WHOLE * 5e-3).half().float() * 2e2, "rounded to multiples of 1.19e-05"),  # not all below its normal numbers
        ((WHOLE * 4e3).round() / 4e3, "rounded to multiples of 0.00025"),
    ],
)
def test_a_narrower_type_is_told(seen: Tensor, words: str) -> None:
    assert told(seen, WHOLE) == words


@pytest.mark.parametrize(
    "seen",
    [
        WHOLE,
        WHOLE * 1.001,
        WHOLE + 1e-5 * torch.randn(WHOLE.shape, generator=torch.Generator().manual_seed(1)),
        torch.where(WHOLE > 0, WHOLE, 0.0),
        WHOLE.flip(0).half().float(),  # rounded, and more than that
        WHOLE.clamp(-1e-3, 1e-3),
    ],
    ids=["same", "scaled", "noise", "half of it", "another", "clamped"],
)
def test_other_changes_are_no_rounding(seen: Tensor) -> None:
    assert told(seen, WHOLE) is None


def test_a_few_coarse_numbers_that_a_narrower_type_holds_by_chance_are_not_rounded() -> None:
    """Sums of bf16 have few digits: all of 16 may be in a narrower type, and one that is due may not."""
    seen = torch.arange(16.0) + 16.25
    due = seen + torch.tensor([2.0**-9, *[0.0] * 15])
    assert told(seen, due) is None
    assert told(seen, due + 2.0**-9) == "bf16-rounded"


def test_fp32_is_a_narrower_type_of_fp64_alone() -> None:
    whole = WHOLE.double() / 3
    assert told(whole.float().double(), whole) == "fp32-rounded"
    assert told(whole.float().double() * (1 + 1e-12), whole) is None
    seen, due = sketch(whole.float().double()), sketch(whole)
    assert is_rounded_sketch(seen, due)
    assert not sketch(WHOLE).narrow


def test_a_few_elements_prove_no_scale() -> None:
    whole = WHOLE.flatten()[:8]
    assert told((whole * 300).half().float() / 300, whole) is None
    assert told(whole.half().float(), whole) == "fp16-rounded"


def parts(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(64, generator=draw).bfloat16() for _ in range(count)]


def test_what_was_added_up_in_a_narrower_type_is_told_from_a_sum_that_is_rounded_once() -> None:
    four = parts(4)
    narrow, wide = four[0] + four[1] + four[2] + four[3], sum(one.float() for one in four)
    assert added_up_in(narrow.float(), four, "bf16") is True
    assert added_up_in(wide.bfloat16().float(), four, "bf16") is None  # type: ignore[union-attr]
    assert added_up_in(wide, four, "bf16") is None  # type: ignore[arg-type]
    assert added_up_in(narrow.float(), four[::-1], "bf16") is None, "in another order it has other bits"
    assert added_up_in(narrow.float() * 2, four, "bf16") is None


def test_two_are_added_up_alike_in_either_way() -> None:
    two = parts(2)
    assert added_up_in((two[0] + two[1]).float(), two, "bf16") is False


def test_one_value_that_is_there_often_is_no_rounding() -> None:
    """As of a norm's weights, all of which were ones, and had something added."""
    assert told(torch.full((64,), 1.1), torch.ones(64)) is None
