"""What is another gradient but for the order of its elements, and what only looks like it by chance."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipeproof.explain.reordering import is_reordered

COARSE, FINE = 2.0**-6, 2.0**-19  # what rounding leaves in bf16 and in fp32
SHAPE = (48, 32)


def drawn(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rounded(tensor: Tensor, limit: float) -> Tensor:
    return tensor * (1 + limit / 8 * drawn(9, tuple(tensor.shape)))


ORDERS: list[Callable[[Tensor], Tensor]] = [
    lambda one: one.roll(24, 0),
    lambda one: one[torch.randperm(48, generator=torch.Generator().manual_seed(3))],
    lambda one: one[:, torch.randperm(32, generator=torch.Generator().manual_seed(3))],
    lambda one: one.flip(1),
    lambda one: one.roll(1),
    lambda one: torch.cat([one[:1], one[1:3].flip(0), one[3:]]),
]


@pytest.mark.parametrize(
    ("change", "limit"), [*((one, FINE) for one in ORDERS), *((ORDERS[k], COARSE) for k in (0, 3, 4))]
)
def test_lines_and_shifts_are_told_however_coarse_the_type(change: Callable[[Tensor], Tensor], limit: float) -> None:
    assert is_reordered(rounded(change(drawn(0)), limit), drawn(0), limit)


def test_a_transposed_weight_is_told_however_coarse_the_type() -> None:
    one = drawn(0, (32, 32))
    assert is_reordered(rounded(one.T, COARSE), one, COARSE)


def test_any_order_of_many_elements_is_told_in_a_fine_type_only() -> None:
    """In a coarse one some order of many numbers of one kind always fits."""
    one = drawn(0)
    mixed = one.flatten()[torch.randperm(one.numel(), generator=torch.Generator().manual_seed(3))].view(SHAPE)
    assert is_reordered(rounded(mixed, FINE), one, FINE)
    assert not is_reordered(rounded(mixed, COARSE), one, COARSE)


@pytest.mark.parametrize("limit", [COARSE, 4 * COARSE])
def test_numbers_of_one_kind_are_no_order_of_each_other(limit: float) -> None:
    """Although, sorted, they differ by no more than rounding."""
    one, other = drawn(0, (200, 200)), drawn(1, (200, 200))
    apart = (one.flatten().sort()[0] - other.flatten().sort()[0]).norm() / other.norm()
    assert apart < COARSE
    assert not is_reordered(one, other, limit)


@pytest.mark.parametrize("noise", [2.0, 8.0, 32.0])
def test_noise_is_no_order(noise: float) -> None:
    assert not is_reordered(drawn(0) + noise * COARSE * drawn(1), drawn(0), COARSE)


def test_a_row_in_place_of_another_is_no_order() -> None:
    one = drawn(0)
    one[3] = one[5]
    assert not is_reordered(one, drawn(0), COARSE)
    one[3] = 0
    assert not is_reordered(one, drawn(0), COARSE)


def test_what_is_right_or_nothing_is_no_order() -> None:
    for one, other in ((drawn(0), drawn(0)), (drawn(0), torch.zeros(SHAPE)), (torch.zeros(SHAPE), drawn(0))):
        assert not is_reordered(one, other, COARSE)
    assert not is_reordered(drawn(0).T, drawn(0), COARSE)
