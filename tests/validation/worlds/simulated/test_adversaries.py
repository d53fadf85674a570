"""Each adversary has its own kind of bad luck, draws it from the seed alone, and lets everybody go on in the end."""

from itertools import pairwise
from random import Random

import pytest

from pipeproof.worlds.simulated.adversaries import (
    ADVERSARIES,
    Fair,
    Longest,
    NewestFirst,
    Priorities,
    Soonest,
    Starving,
    name_of,
)

RANKS, DRAWS = 3, 400


@pytest.mark.parametrize("name", ADVERSARIES)
def test_a_seed_decides_all(name: str) -> None:
    seed = list(ADVERSARIES).index(name) + 2 * len(ADVERSARIES)
    assert name_of(seed) == name
    asked = [(range(k % (RANKS + 1)), range((k + 1) % 4)) for k in range(DRAWS)]
    one, other = ([by.choose(*some) for some in asked if some[0] or some[1]] for by in (Fair(seed, 3), Fair(seed, 3)))
    assert one == other
    assert one != [Fair(seed + len(ADVERSARIES), 3).choose(*some) for some in asked if some[0] or some[1]]


@pytest.mark.parametrize("seed", range(2 * len(ADVERSARIES)))
def test_nobody_waits_for_ever(seed: int) -> None:
    """A rank that asks again and again whether its message is there lets the others, and the message, go on."""
    by = Fair(seed, RANKS)
    assert {by.choose(range(RANKS), range(2)) for _ in range(20 * DRAWS)} == set(range(RANKS + 2))


def test_newest_first() -> None:
    by = NewestFirst(Random(0), RANKS)
    assert {by.choose([0, 1], range(5)) for _ in range(DRAWS)} == {0, 1, 6}


def test_as_late_as_possible_and_as_soon() -> None:
    late, soon = Longest(Random(0), RANKS), Soonest(Random(0), RANKS)
    assert {late.choose([0, 1], range(2)) for _ in range(DRAWS)} == {0, 1}
    assert {late.choose([], range(2)) for _ in range(DRAWS)} == {0, 1}
    assert {soon.choose([0, 1], range(2)) for _ in range(DRAWS)} == {2, 3}
    assert {soon.choose([0, 1], range(0)) for _ in range(DRAWS)} == {0, 1}


def test_a_starved_rank_has_the_turn_where_nothing_else_can_happen() -> None:
    by = Starving(Random(0), RANKS)
    (victim,) = set(range(RANKS)) - {by.choose(range(RANKS), range(0)) for _ in range(DRAWS)}
    assert {by.choose([victim], range(2)) for _ in range(DRAWS)} == {1, 2}
    assert by.choose([victim], range(0)) == 0


def test_priorities_change_at_few_steps() -> None:
    found, changes = set(), []
    for seed in range(20):
        by = Priorities(Random(seed), RANKS)
        chosen = [min(by.choose(range(RANKS), range(1)), RANKS) for _ in range(DRAWS)]
        found.add(chosen[0])
        changes.append(sum(a != b for a, b in pairwise(chosen)))
    assert max(changes) == 2
    assert found == set(range(RANKS + 1))
