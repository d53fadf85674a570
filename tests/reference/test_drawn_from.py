"""What a computation draws from is observed, and put back."""

import cProfile
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pipeproof.reference.drawn_from import DrawnFrom, KeptElsewhere

TORCH, PYTHON = torch.Generator().manual_seed(3), random.Random(3)
NUMPY, BEFORE = {"mine": numpy.random.default_rng(3)}, numpy.random.RandomState(3)
AWAY = torch.Generator().manual_seed(9).get_state()


class Lazy(dict[str, int]):
    """Whoever asks it for its values makes it load them all."""

    def values(self) -> Any:
        raise AssertionError("nobody is to ask")


class Noise:
    of_all, of_method = numpy.random.default_rng(7), numpy.random.default_rng(8)
    bound = partial(of_method.random)

    def __init__(self) -> None:
        self.lazy = Lazy(a=1)
        self.arrays = numpy.random.default_rng(9)


HOLDER = SimpleNamespace(noise=Noise())


def in_a_loop() -> Iterator[float]:
    own = numpy.random.default_rng(6)
    KEPT_IN_LOOP.append(own)
    while True:
        yield own.random()


KEPT_IN_LOOP: list[numpy.random.Generator] = []
LOOP = in_a_loop()
next(LOOP)


DRAWS: list[tuple[Callable[[], object], Any]] = [
    (lambda: torch.ones(3).normal_(generator=TORCH), TORCH),
    (lambda: PYTHON.random() + 1, PYTHON),
    (lambda: NUMPY["mine"].random(3), NUMPY["mine"]),
    (lambda: BEFORE.random_sample(3), BEFORE),
    (lambda: (HOLDER.noise.lazy, HOLDER.noise.arrays.random(3)), HOLDER.noise.arrays),
    (lambda: Noise.of_all.random(3), Noise.of_all),
    (lambda: Noise().bound(), Noise.of_method),
    (lambda: next(LOOP), KEPT_IN_LOOP[0]),
]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("draw", "generator"), DRAWS)
def test_unknown_generators_that_are_drawn_from_are_seen(
    draw: Callable[[], object], generator: Any, known: bool
) -> None:
    with DrawnFrom([generator] if known else [], [torch.device("cpu")]) as drawn:
        draw()
        draw()
    assert drawn.others == ([] if known else [generator])


def test_one_around_a_function_is_seen() -> None:
    own = numpy.random.default_rng(4)
    with DrawnFrom([], []) as drawn:
        (lambda: own.random())()
    assert drawn.others == [own]


def seeded() -> None:
    TORCH.manual_seed(5)
    torch.rand(2, generator=TORCH)
    random.Random(5).random()


OTHERS: list[Callable[[], object]] = [
    lambda: bool(NUMPY),  # it is named alone
    lambda: (torch.rand(2), random.random(), numpy.random.random()),
    lambda: (lambda generator: generator.random())(numpy.random.default_rng()),
    seeded,
]


@pytest.mark.parametrize("draw", OTHERS)
def test_what_is_known_or_seeded_is_no_other(draw: Callable[[], object]) -> None:
    with DrawnFrom([], [torch.device("cpu")]) as drawn:
        draw()
    assert drawn.others == []


def swapped() -> float:
    """Draws from a state that is kept elsewhere."""
    outer = torch.get_rng_state()
    torch.set_rng_state(AWAY)
    drawn = torch.rand(()).item()
    torch.set_rng_state(outer)
    return drawn


def test_a_state_that_is_kept_elsewhere_is_not_drawn_from() -> None:
    before = torch.get_rng_state()
    with DrawnFrom([], [torch.device("cpu")]), pytest.raises(KeptElsewhere):
        swapped()
    torch.set_rng_state(before)


def test_where_a_keeper_is_known_it_is() -> None:
    class Keeper:
        get_states = set_states = dict

    before = torch.get_rng_state()
    with DrawnFrom([Keeper()], [torch.device("cpu")]):
        swapped()
    assert torch.equal(torch.get_rng_state(), before)


def test_states_that_were_there_may_be_set_again() -> None:
    x = torch.ones(4, requires_grad=True)
    with DrawnFrom([], [torch.device("cpu")]), torch.random.fork_rng():
        torch.manual_seed(7)
        checkpoint(torch.nn.functional.dropout, x, use_reentrant=False).sum().backward()


def test_a_profiler_of_the_users_own_goes_on() -> None:
    observed: list[str] = []
    sys.setprofile(lambda frame, event, arg: observed.append(event))
    try:
        own = sys.getprofile()
        with suppress(ZeroDivisionError), DrawnFrom([], []):
            1 / 0  # noqa: B018
        assert sys.getprofile() is own
    finally:
        sys.setprofile(None)
    assert observed


def test_under_a_profiler_in_c_nothing_breaks_and_what_operators_are_given_is_seen() -> None:
    with cProfile.Profile(), DrawnFrom([], []) as drawn:
        DRAWS[0][0]()
    assert drawn.others == [TORCH]
    assert not torch.overrides._get_current_function_mode_stack()
