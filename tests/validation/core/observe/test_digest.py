"""A digest is of every bit, however long the tensor is, and the same wherever it is made."""

import math

import pytest
import torch

from pipeproof.core.observe.digest import _AT_ONCE, ROW, digest, keys

SIZES = (1, 2 * ROW - 1, 2 * ROW, 2 * ROW + 1, 4 * ROW + 3, 2 * _AT_ONCE + 2 * ROW + 5)  # bytes


@pytest.mark.parametrize("size", SIZES)
def test_each_bit_and_each_place_counts(size: int) -> None:
    one = torch.randint(256, (size,), generator=torch.Generator().manual_seed(size)).to(torch.uint8)
    observed = {digest(one)}
    places = {0, size // 2, size - 1, *range(0, size, max(1, size // 5))}
    for place in places:
        for bit in (0, 7):
            other = one.clone()
            other[place] ^= 1 << bit
            observed.add(digest(other))
    assert len(observed) == 1 + 2 * len(places)
    assert digest(one.clone()) in observed


@pytest.mark.parametrize("size", SIZES)
def test_a_part_that_begins_at_an_odd_place_is_as_any(size: int) -> None:
    whole = torch.arange(size + 1).to(torch.uint8)
    assert digest(whole[1:]) == digest(whole[1:].clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_what_happens_to_whole_tensors_changes_it(dtype: torch.dtype) -> None:
    one = torch.randn(200, 700, generator=torch.Generator().manual_seed(1)).mul(100)
    one = one > 0 if dtype is torch.bool else one.to(dtype)
    swapped, twice = one.clone(), one.clone()
    swapped[[3, 150]] = one[[150, 3]]
    others = [one.view(700, 200), swapped, one.flip(0), one.flip(1), one.roll(1), twice * 0]
    if dtype.is_floating_point:
        twice[5], twice[9] = -one[5], -one[9]  # of an even number of elements the sign
        others += [-one, twice, one * 2, one + 0.125, one.abs()]
    assert len({digest(each) for each in [one, *others]}) == 1 + len(others)


def test_rows_that_change_places_change_it() -> None:
    one = torch.arange(4, dtype=torch.int16)[:, None].expand(4, ROW)
    orders = ((0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (3, 1, 2, 0))
    assert len({digest(one[[*order]]) for order in orders}) == len(orders)


def test_sums_are_exact_at_their_largest() -> None:
    largest = torch.full((ROW,), -(1 << 15), dtype=torch.float64)
    sums = keys(torch.device("cpu")) @ largest
    assert sums.abs().max() < 2**53
    for one, key in zip(sums, keys(torch.device("cpu")), strict=True):
        assert one == math.fsum((largest * key).tolist())


def test_another_order_of_sums_makes_no_other() -> None:
    one = torch.randn(3 * ROW, generator=torch.Generator().manual_seed(2))
    threads = torch.get_num_threads()
    try:
        found = set()
        for count in (1, 2):
            torch.set_num_threads(count)
            found.add(digest(one))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


def test_where_tensors_are_made_by_default_does_not_matter() -> None:
    one = torch.randn(2 * ROW)
    expected = digest(one)
    keys.cache_clear()
    with torch.device("meta"):
        assert digest(one) == expected
