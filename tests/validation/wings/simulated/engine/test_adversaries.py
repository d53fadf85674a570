"""Each adversary has its own kind of bad luck, draws it from the seed alone, and lets everybody go on in the end."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from pipeproof.wings.simulated.engine.adversaries import ADVERSARIES, Fair, Priorities, Starving, Uniform, name_of
from pipeproof.wings.simulated.engine.events import Actor

RANKS, DRAWS = 3, 400
A, B, C = MESSAGES = [(0, 0), (1, 0), (0, 1)]


def drawn(by: Fair | Uniform, *able: Sequence[Actor]) -> list[Actor]:
    return [by.choose(one) for one in able if one]


@pytest.mark.parametrize("name", ADVERSARIES)
def test_a_seed_decides_all(name: str) -> None:
    seed = list(ADVERSARIES).index(name) + 2 * len(ADVERSARIES)
    assert name_of(seed) == name
    asked = [[*range(k % (RANKS + 1)), *MESSAGES[: (k + 1) % 4]] for k in range(DRAWS)]
    assert drawn(Fair(seed, RANKS), *asked) == drawn(Fair(seed, RANKS), *asked)
    assert drawn(Fair(seed, RANKS), *asked) != drawn(Fair(seed + len(ADVERSARIES), RANKS), *asked)


@pytest.mark.parametrize("seed", range(2 * len(ADVERSARIES)))
def test_nobody_waits_for_ever(seed: int) -> None:
    """A rank that asks again and again whether its message is there lets the others, and the message, go on."""
    able = [*range(RANKS), A, B]
    assert set(drawn(Fair(seed, RANKS), *[able] * 20 * DRAWS)) == set(able)


@pytest.mark.parametrize(
    ("name", "able", "chosen"),
    [
        ("newest message first", [0, 1, A, B, C], {0, 1, C}),
        ("longest delay", [0, 1, A, B], {0, 1}),
        ("longest delay", [A, B], {A, B}),
        ("no delay", [0, 1, A, B], {A, B}),
        ("no delay", [0, 1], {0, 1}),
    ],
)
def test_whom_an_adversary_prefers(name: str, able: list[Actor], chosen: set[Actor]) -> None:
    assert set(drawn(ADVERSARIES[name](Random(0), RANKS), *[able] * DRAWS)) == chosen


def test_a_starved_rank_has_the_turn_where_nothing_else_can_happen() -> None:
    by = Starving(Random(0), RANKS)
    (victim,) = set(range(RANKS)) - set(drawn(by, *[[*range(RANKS)]] * DRAWS))
    assert set(drawn(by, *[[victim, A, B]] * DRAWS)) == {A, B}
    assert by.choose([victim]) == victim


def test_priorities_change_at_few_steps() -> None:
    found, changes = set(), []
    for seed in range(20):
        chosen = drawn(Priorities(Random(seed), RANKS), *[[*range(RANKS), A]] * DRAWS)
        found.add(chosen[0])
        changes.append(sum(a != b for a, b in pairwise(chosen)))
    assert max(changes) == 2
    assert found == {*range(RANKS), A}
