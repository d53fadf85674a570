"""A module that is called more than once in a forward has a place for each of its calls."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from tests.support.two_ranks import (
    WIDTH,
    all_forward_all_backward,
    half,
    judged,
    model_of,
    named,
    passes,
    plain_block,
    step,
)
from validation.foreign import WhiteBox, watch


class Residual(nn.Module):
    """As ResNet's blocks: one activation for both of its ends."""

    def __init__(self, *, inplace: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.relu = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.two(self.relu(self.one(x)))
        result += x
        return self.relu(result)  # type: ignore[no-any-return]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = plain_block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))  # type: ignore[no-any-return]


REPEATING = [Residual, partial(Residual, inplace=True), Twice]


@pytest.mark.parametrize("block", REPEATING, ids=["residual", "in place", "twice"])
def test_a_stage_may_end_in_a_module_that_is_called_twice(whitebox: WhiteBox, block: Callable[[], nn.Module]) -> None:
    build = partial(model_of, block)
    assert passes(judged(whitebox, step, build)).law("boundaries").checked >= 28
    half_of_it = partial(step, passed=lambda m, gradient: gradient / 2 if m == 1 else gradient)
    assert named(judged(whitebox, half_of_it, build)) == [("scale", 0, 0, (1,))]


def test_a_watched_block_that_is_applied_twice_is_one(whitebox: WhiteBox) -> None:
    def inner(model: nn.Sequential, microbatches: list[Any], **options: Any) -> Any:
        stage = half(model)
        assert isinstance(stage[1], Twice)
        watch(stage[1].block)
        return stage, all_forward_all_backward(stage, microbatches, **options)

    build = partial(model_of, Twice)
    assert passes(judged(whitebox, inner, build)).law("boundaries").outcome == "pass"
    half_of_it = partial(inner, passed=lambda m, gradient: gradient / 2 if m == 1 else gradient)
    assert named(judged(whitebox, half_of_it, build)) == [("scale", 0, 0, (1,))]
