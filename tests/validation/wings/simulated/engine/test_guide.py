"""A guide says of a run what is not in turn, in words that a command line takes; following it gives the same run."""

import pytest
import torch.distributed as dist

from pipeproof.wings.simulated import SimulatedWorld
from pipeproof.wings.simulated.engine.guide import Guide, Preemption, guide_of, preemptions
from pipeproof.worlds.worker import RankContext

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
