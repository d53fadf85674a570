"""Which tensors of one shape another one is near to."""

import torch
from torch import Tensor

from validation.diagnosis.nearest import Likes
from validation.judging.tolerance import error

LIMIT = 1e-5


def tensors() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(40, 50, generator=draw) for _ in range(6)]


def test_what_is_near_is_found_as_if_each_were_compared() -> None:
    known = tensors()
    for k, tensor in enumerate(known):
        for seen in (tensor, tensor * (1 + LIMIT / 2), tensor * (1 + 2 * LIMIT)):
            assert list(Likes(known).near(seen, LIMIT)) == [
                n for n, one in enumerate(known) if error(seen, one) <= LIMIT
            ]
        assert list(Likes(known).near(tensor, LIMIT)) == [k]


def test_an_element_that_no_sample_holds_is_not_overlooked() -> None:
    known = tensors()
    for element in range(0, 2000, 111):
        seen = known[2].clone()
        seen.view(-1)[element] += 1.0
        assert not list(Likes(known).near(seen, LIMIT))


def test_what_is_not_a_number_is_near_nothing() -> None:
    known = tensors()
    assert not list(Likes(known).near(known[0] * float("nan"), LIMIT))


def test_a_limit_may_be_relative_to_a_larger_size() -> None:
    known = tensors()
    seen = known[1] + LIMIT * 10
    assert not list(Likes(known).near(seen, LIMIT))
    assert list(Likes(known).near(seen, LIMIT, size=1000.0)) == [1]
