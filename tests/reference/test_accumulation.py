"""Sums of microbatches' gradients in the order and in the types of a framework."""

import pytest
import torch
from torch import Tensor

from pipeproof.reference.accumulation import PLAIN, Accumulation, add_onto, add_parts

BF16, FP32 = torch.bfloat16, torch.float32


def parts(count: int = 4) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(64, generator=draw).to(BF16) for _ in range(count)]


def test_a_sum_has_the_type_of_its_parts_or_the_one_that_is_said() -> None:
    a, b, c, d = parts()
    narrow = PLAIN.total([a, b, c, d], [0, 1, 2, 3])
    wide = Accumulation(FP32).total([a, b, c, d], [0, 1, 2, 3])
    assert narrow is not None
    assert wide is not None
    assert torch.equal(narrow, ((a + b) + c) + d)
    assert torch.equal(wide, ((a.float() + b.float()) + c.float()) + d.float())
    assert (narrow.dtype, wide.dtype) == (BF16, FP32)
    assert not torch.equal(narrow.float(), wide)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_each_replica_adds_its_own_first_in_the_order_of_all(order: list[int]) -> None:
    given = parts()
    one, other = ([m for m in order if m in own] for own in ((0, 2), (1, 3)))
    found = Accumulation(shares=((0, 2), (1, 3))).total(given, order)
    assert found is not None
    assert torch.equal(found, (given[one[0]] + given[one[1]]) + (given[other[0]] + given[other[1]]))


def test_sums_are_rounded_while_replicas_reduce_them_be_it_one_alone() -> None:
    a, b, c, d = parts()
    one = Accumulation(FP32, BF16).total([a, b], [0, 1])
    two = Accumulation(FP32, BF16, shares=((0, 1), (2, 3))).total([a, b, c, d], [0, 1, 2, 3])
    assert one is not None
    assert two is not None
    assert torch.equal(one, (a.float() + b.float()).to(BF16).float())
    assert torch.equal(two, ((a.float() + b.float()).to(BF16) + (c.float() + d.float()).to(BF16)).float())


def test_a_sum_goes_on_from_one_before_it() -> None:
    a, b = parts(2)
    assert torch.equal(add_parts([PLAIN.total([a], [0]), b]), PLAIN.total([b], [0], onto=a))  # type: ignore[arg-type]


def test_what_nobody_gives_a_gradient_has_none() -> None:
    (a,) = parts(1)
    assert Accumulation(FP32, BF16, shares=((0,), (1,))).total([None, None], [0, 1]) is None
    found = Accumulation(FP32, shares=((0,), (1,))).total([None, a], [0, 1])
    assert found is not None
    assert torch.equal(found, a.float())


def test_the_whole_is_cast_at_last() -> None:
    a, b, c, d = parts()
    found = Accumulation(FP32, shares=((0, 1), (2, 3)), result=BF16).total([a, b, c, d], [0, 1, 2, 3])
    assert found is not None
    assert torch.equal(found, ((a.float() + b.float()) + (c.float() + d.float())).to(BF16))


def test_what_replicas_began_with_is_one_alike_or_a_sum() -> None:
    a, b, *_ = parts()
    assert add_onto([a, a.clone()]) is a
    assert add_onto([None, a]) is a
    assert add_onto([None, None]) is None
    both = add_onto([a, b])
    assert both is not None
    assert torch.equal(both, a + b)


def test_bundles_are_added_up_in_their_own_type_first() -> None:
    a, b, c, d = parts()
    by = Accumulation(FP32, bundles={1: [[1, 2]]})
    (here,) = by.of_each([a, b, c, d], [0, 1, 2, 3], stage=1)
    (elsewhere,) = by.of_each([a, b, c, d], [0, 1, 2, 3])
    assert here is not None
    assert elsewhere is not None
    assert torch.equal(here, a.float() + (b + c).float() + d.float())
    assert torch.equal(elsewhere, a.float() + b.float() + c.float() + d.float())
    assert not torch.equal(here, elsewhere)


def test_bundles_go_by_the_numbers_in_a_replica() -> None:
    a, b, c, d = parts()
    by = Accumulation(FP32, shares=((0, 2), (1, 3)), bundles={0: [[0, 1]]})
    first, second = by.of_each([a, b, c, d], [0, 1, 2, 3])
    assert first is not None
    assert second is not None
    assert torch.equal(first, (a + c).float())
    assert torch.equal(second, (b + d).float())
