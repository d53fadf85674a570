"""Who decides: each adversary has its kind of bad luck, and lets everybody go on in the end; a guide repeats a run."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
import torch.distributed as dist

from pipeproof.wings.simulated import SimulatedWorld
from pipeproof.wings.simulated.engine.decisions import (
    ADVERSARIES,
    Choose,
    Guide,
    Preemption,
    fair,
    guide_of,
    name_of,
    preemptions,
)
from pipeproof.wings.simulated.engine.events import Actor
from pipeproof.worlds.worker import RankContext

RANKS, DRAWS = 3, 400
A, B, C = MESSAGES = [(0, 0), (1, 0), (0, 1)]


def drawn(choose: Choose, *able: Sequence[Actor]) -> list[Actor]:
    return [choose(one) for one in able if one]


@pytest.mark.parametrize("name", ADVERSARIES)
def test_a_seed_decides_all(name: str) -> None:
    seed = list(ADVERSARIES).index(name) + 2 * len(ADVERSARIES)
    assert name_of(seed) == name
    asked = [[*range(k % (RANKS + 1)), *MESSAGES[: (k + 1) % 4]] for k in range(DRAWS)]
    assert drawn(fair(seed, RANKS), *asked) == drawn(fair(seed, RANKS), *asked)
    assert drawn(fair(seed, RANKS), *asked) != drawn(fair(seed + len(ADVERSARIES), RANKS), *asked)


@pytest.mark.parametrize("seed", range(2 * len(ADVERSARIES)))
def test_nobody_waits_for_ever(seed: int) -> None:
    """A rank that asks again and again whether its message is there lets the others, and the message, go on."""
    able = [*range(RANKS), A, B]
    assert set(drawn(fair(seed, RANKS), *[able] * 20 * DRAWS)) == set(able)


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


def test_a_starved_rank_goes_last() -> None:
    choose = ADVERSARIES["one rank starved"](Random(0), RANKS)
    (victim,) = set(range(RANKS)) - set(drawn(choose, *[[*range(RANKS)]] * DRAWS))
    assert set(drawn(choose, *[[victim, A, B]] * DRAWS)) == {A, B}
    assert choose([victim]) == victim


def test_priorities_change_at_few_steps() -> None:
    found, changes = set(), []
    for seed in range(20):
        chosen = drawn(ADVERSARIES["priorities"](Random(seed), RANKS), *[[*range(RANKS), A]] * DRAWS)
        found.add(chosen[0])
        changes.append(sum(a != b for a, b in pairwise(chosen)))
    assert max(changes) == 2
    assert found == {*range(RANKS), A}


GUIDE = Guide((Preemption(0, 5, (1, 2)), Preemption((1, 2), 0, 1)))


def test_a_guide_is_read_as_it_is_written() -> None:
    assert str(GUIDE) == "in-turn,r0@5=m1.2,m1.2@0=r1"
    assert guide_of(str(GUIDE)) == GUIDE
    assert guide_of("in-turn") == Guide()


@pytest.mark.parametrize(
    "text", ["", "turn", "in-turn,", "in-turn,r0@5", "in-turn,0@5=r1", "in-turn,r0@-1=r1", "r0@5=r1"]
)
def test_what_is_no_guide_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"expected a seed, or in-turn and what differs from it, as in in-turn,r0@5=m1.2"
    ):
        guide_of(text)


def rings(context: RankContext) -> None:
    for _ in range(3):
        dist.barrier()


@pytest.mark.parametrize("seed", range(6))
def test_the_preemptions_of_a_run_give_that_run(seed: int, simulated: SimulatedWorld) -> None:
    actors = []
    for guide in (None, ...):
        if guide is None:
            simulated.seed = seed
        simulated.noted = True
        simulated.run(rings, ranks=3)
        assert simulated.course is not None, "its course was to be noted"
        assert not simulated.course.astray
        actors.append([event.actor for event in simulated.course.events])
        simulated.seed = Guide(preemptions(simulated.course.events))
    assert actors[0] == actors[1]


def test_a_guide_of_another_run_is_found_out(simulated: SimulatedWorld) -> None:
    simulated.seed, simulated.noted = GUIDE, True
    simulated.run(rings, ranks=2)
    assert simulated.course is not None, "its course was to be noted"
    assert simulated.course.astray
