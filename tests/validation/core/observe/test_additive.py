"""Sums over elements by where they lie: parts of any bounds add up to the whole, and every bit and place counts."""

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from pipeproof.core.observe.additive import _draw_factors
from pipeproof.core.observe.digest import ROW
from pipeproof.core.observe.shards import Shard
from pipeproof.core.observe.sketch import add_sketches, brief

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
