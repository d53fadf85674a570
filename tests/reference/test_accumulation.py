"""Sums of microbatches' gradients in the order and in the types of a framework."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeproof.reference.accumulation import PLAIN, Accumulation, add_onto, add_parts

BF16, FP32, HALVES = torch.bfloat16, torch.float32, ((0, 1), (2, 3))


def parts(count: int = 4) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(64, generator=draw).to(BF16) for _ in range(count)]


def total(by: Accumulation, given: Sequence[Tensor | None], order: Sequence[int], *, onto: Any = None) -> Tensor | None:
    return by.reduce(by.of_each(given, order, onto=onto))


def same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.dtype is other.dtype and torch.equal(one, other)


def wide(*given: Tensor) -> Tensor:
    total = given[0].float()
    for one in given[1:]:
        total = total + one.float()
    return total


CASES: dict[str, tuple[Accumulation, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]] = {
    "the type of its parts": (PLAIN, lambda a, b, c, d: ((a + b) + c) + d),
    "the type that is said": (Accumulation(FP32), wide),
    "rounded while reduced, one alone": (Accumulation(FP32, BF16), lambda *given: wide(*given).to(BF16).float()),
    "rounded while reduced": (
        Accumulation(FP32, BF16, shares=HALVES),
        lambda a, b, c, d: (wide(a, b).to(BF16) + wide(c, d).to(BF16)).float(),
    ),
    "cast at last": (
        Accumulation(FP32, shares=HALVES, result=BF16),
        lambda a, b, c, d: (wide(a, b) + wide(c, d)).to(BF16),
    ),
    "bundles in their own type": (
        Accumulation(FP32, bundles={0: [[1, 2]]}),
        lambda a, b, c, d: a.float() + (b + c).float() + d.float(),
    ),
    "bundles of another stage": (Accumulation(FP32, bundles={1: [[1, 2]]}), wide),
    "bundles by the numbers in a replica": (
        Accumulation(FP32, shares=((0, 2), (1, 3)), bundles={0: [[0, 1]]}),
        lambda a, b, c, d: (a + c).float() + (b + d).float(),
    ),
}


@pytest.mark.parametrize(("by", "expected"), CASES.values(), ids=CASES)
def test_a_sum_is_that_of_its_types(by: Accumulation, expected: Callable[..., Tensor]) -> None:
    assert same(total(by, parts(), [0, 1, 2, 3]), expected(*parts()))


def test_types_and_bundles_make_other_sums() -> None:
    every = [expected(*parts()).float() for _, expected in CASES.values()]
    # Another stage's bundles are as none, and of one replica a cast at last is as one between.
    assert len({tuple(one.tolist()) for one in every}) == len(every) - 2


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_each_replica_adds_its_own_first_in_the_order_of_all(order: list[int]) -> None:
    given = parts()
    one, other = ([m for m in order if m in own] for own in ((0, 2), (1, 3)))
    found = total(Accumulation(shares=((0, 2), (1, 3))), given, order)
    assert same(found, (given[one[0]] + given[one[1]]) + (given[other[0]] + given[other[1]]))


def test_a_sum_goes_on_from_one_before_it() -> None:
    a, b = parts(2)
    assert same(total(PLAIN, [b], [0], onto=a), a + b)
    assert same(add_parts([total(PLAIN, [a], [0]), b]), a + b)


def test_what_nobody_gives_a_gradient_has_none() -> None:
    (a,) = parts(1)
    assert total(Accumulation(FP32, BF16, shares=((0,), (1,))), [None, None], [0, 1]) is None
    assert same(total(Accumulation(FP32, shares=((0,), (1,))), [None, a], [0, 1]), a.float())


def test_what_replicas_began_with_is_one_alike_or_a_sum() -> None:
    a, b, *_ = parts()
    assert add_onto([a, a.clone()]) is a
    assert add_onto([None, a]) is a
    assert add_onto([None, None]) is None
    assert same(add_onto([a, b]), a + b)
