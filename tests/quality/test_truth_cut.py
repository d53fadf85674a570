"""Faults of stages that are cut inside: all are in the campaign, and here those that were named wrong once."""

import pytest
from truth_check import check
from truth_cut import FAULTS, RIGHT, Cut, cuts

from pipeproof.core.cause import KINDS
from pipeproof.worlds.world import World

pytestmark = pytest.mark.long


def test_every_fault_has_a_truth() -> None:
    every = list(cuts())
    assert len({one.title for one in every}) == len(every) == len(FAULTS) + len(RIGHT)
    assert all(one.truth.kinds for one in FAULTS.values())
    assert {kind for one in every for kind in one.truth.kinds} <= set(KINDS)


def named(one: Cut, world: World) -> str:
    """What it is said to be, where all that is said is true."""
    found = check(one.verdict(world), one.truth, one.counts)
    assert (found.caught, found.false) == (True, ()), found
    return found.naming


@pytest.mark.sampled(3)
@pytest.mark.parametrize("title", ["the loss of one rank, twice", "gradients of the step before", "losses times tp"])
def test_a_fault_is_named(title: str, simulated: World) -> None:
    assert named(FAULTS[title], simulated) == "right"
