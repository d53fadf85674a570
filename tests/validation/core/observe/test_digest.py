"""A digest is of every bit, however long the tensor is, and the same wherever it is made; those of parts add up."""

import math
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from pipeproof.core.observe.digest import _AT_ONCE, ROW, _draw_factors, digest, keys
from pipeproof.core.observe.shards import Shard
from pipeproof.core.observe.sketch import add_sketches, brief

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


SHAPES = [(), (7,), (100_000,), (16, 8), (300, 700), (3, 5, 20_000), (9, 4000, 2)]
TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64]


def in_parts(whole: Tensor, draw: torch.Generator) -> list[tuple[tuple[int, int], ...]]:
    """The bounds of parts, cut at random in every dimension; some may be empty."""
    cuts = [
        [0, *torch.randint(length + 1, (2,), generator=draw).sort().values.tolist(), length] for length in whole.shape
    ]
    return list(product(*(list(pairwise(one)) for one in cuts)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_add_up_to_the_whole(shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(len(shape))
    for dtype in TYPES:
        whole = (10 * torch.randn(shape, generator=draw)).to(dtype)
        expected = brief(whole)
        places = [Shard(one, shape) for one in in_parts(whole, draw)]
        found = add_sketches([brief(one.of(whole), at=one) for one in places], shape)
        assert found.digest == expected.digest, (dtype, places)
        assert found.norm == pytest.approx(expected.norm)
        assert found.projections == pytest.approx(expected.projections, abs=1e-9 * expected.norm)


def payload(one: Tensor) -> None:
    one.view(torch.int32)[5, 5] = 0x7FC00001


def swapped(one: Tensor, dim: int, first: int, second: int) -> None:
    order = list(range(one.shape[dim]))
    order[first], order[second] = second, first
    one.copy_(one.index_select(dim, torch.tensor(order)))


CHANGES = {
    "bit": lambda one: one.view(torch.int32)[299, 299].bitwise_xor_(1),
    "sign bit": lambda one: one[0, 0].neg_(),
    "sign of zero": lambda one: one[7, 7].copy_(torch.tensor(-0.0)),
    "payload": payload,
    "rows": lambda one: swapped(one, 0, 3, 4),
    "far rows": lambda one: swapped(one, 0, 3, 290),
    "columns": lambda one: swapped(one, 1, 0, 8),
    "transposed": lambda one: one.copy_(one.T.clone()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_bit_and_every_place_counts(name: str) -> None:
    torch.manual_seed(1)
    one = torch.randn(300, 300)  # several rows of sums
    one[7, 7], one[5, 5] = 0.0, torch.nan
    other = one.clone()
    CHANGES[name](other)
    assert brief(other).digest != brief(one).digest
    assert brief(other, at=Shard(((300, 600), (0, 300)), (600, 300))).digest != brief(one).digest


def test_what_differs_in_a_column_or_by_a_product_shows_in_most_projections() -> None:
    torch.manual_seed(2)
    one = torch.randn(4096, 16)
    column, outer = torch.zeros(4096, 16), torch.randn(4096, 1) @ torch.randn(1, 16)
    column[:, 3] = torch.randn(4096)
    for change in (column, outer):
        expected = float(change.norm() / one.norm())
        assert 0.3 <= brief(one + change).distance(brief(one)) / expected <= 3.0
        assert brief(one + change).usual_distance(brief(one)) > 0.1 * expected


def test_tables_of_more_rows_begin_with_those_of_fewer() -> None:
    assert torch.equal(_draw_factors(64, 9, 16)[:8], _draw_factors(8, 9, 16))
    assert brief(torch.ones(ROW * 40)).digest != brief(torch.ones(ROW * 41)).digest
