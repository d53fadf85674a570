"""A random case that shows a planted fault shrinks to the smallest, which its specimen states."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from pipeproof.own.case import Case
from pipeproof.wings.specimens import SPECIMENS
from pipeproof.wings.specimens.shrinking import Shrunk, cases_that_show, shrink
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.sweeps import sampled

NAMES = ["stage-negated", "microbatch-dropped", "backward-missing", "tied-not-reduced"]


@pytest.mark.parametrize("name", sampled(NAMES, 2))
def test_a_random_failing_case_shrinks_to_the_stated_one(world: World, name: str) -> None:
    found = shrink(SPECIMENS[name], world, max_ranks=2)
    assert found.as_stated, found
    assert found.cases > 1


@pytest.mark.sweep
def test_a_statement_that_is_not_the_smallest_is_seen(world: World) -> None:
    """A specimen that claims to need more than it does."""
    boast = replace(SPECIMENS["backward-repeated"], schedule="zb-v")  # two stages a rank
    found = shrink(boast, world, max_ranks=2)
    assert not found.as_stated
    golden(str(found), numbers=False)
    assert "nothing failed" in str(Shrunk("x", "y", "", "", 0))


def test_own_have_what_the_specimen_needs() -> None:
    one = SPECIMENS["mean-of-means"]
    observed: list[Case] = []

    @settings(max_examples=20, database=None, deadline=None)
    @given(cases_that_show(one))
    def draw(case: Case) -> None:
        observed.append(case)

    draw()
    assert observed
    assert all(case.loss == "tokens" and case.unequal and not one.missing(case) for case in observed)
