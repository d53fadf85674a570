"""Generators of random numbers go on from where they were, whoever made them."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from pipeproof.reference.generators import GeneratorState, generators_in, is_generator


class Keeper:
    """Has states by name, as Megatron's tracker: tensors, or, for CUDA graphs, generators."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.states = {"a": make(), "b": make()}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states

    def draw(self) -> float:
        state = self.states["a"]
        own = state if isinstance(state, torch.Generator) else torch.Generator()
        if own is not state:
            own.set_state(state)
        drawn = torch.rand((), generator=own).item()
        if own is not state:
            self.states["a"] = own.get_state()
        return drawn


def of_torch() -> tuple[Any, Callable[[], float]]:
    one = torch.Generator().manual_seed(1)
    return one, lambda: torch.rand((), generator=one).item()


# Each makes a generator, and names its way to draw.
OTHERS: list[tuple[Callable[[], Any], str]] = [
    (lambda: random.Random(1), "random"),
    (lambda: numpy.random.default_rng(1), "random"),
    (lambda: numpy.random.RandomState(1), "random_sample"),
    (lambda: Keeper(lambda: torch.Generator().manual_seed(1).get_state()), "draw"),
    (lambda: Keeper(lambda: torch.Generator().manual_seed(1)), "draw"),
]
MAKES = [of_torch, *(lambda make=make, name=name: ((one := make()), getattr(one, name)) for make, name in OTHERS)]


@pytest.mark.parametrize("make", MAKES)
def test_what_was_kept_is_drawn_again(make: Callable[[], tuple[Any, Callable[[], float]]]) -> None:
    one, draw = make()
    assert is_generator(one)
    draw()
    kept = GeneratorState.of(one)
    assert not kept.moved
    drawn = [draw(), draw()]
    assert drawn[0] != drawn[1]
    assert kept.moved
    for _ in range(2):
        kept.put_back()
        assert not kept.moved
        assert [draw(), draw()] == drawn


@pytest.mark.parametrize("one", [random.SystemRandom(), 1, None, Keeper, nn.Linear(1, 1), torch.ones(1)])
def test_what_has_no_state_that_can_be_taken_is_none(one: object) -> None:
    assert not is_generator(one)


def test_those_that_modules_have_are_found_once() -> None:
    module, own = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), torch.Generator()
    module[0].own = module[1].own = own
    module[1].other = random.Random(2)
    assert generators_in(module) == [own, module[1].other]
