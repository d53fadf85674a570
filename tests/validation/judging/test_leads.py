"""Gradients that pass one by one, and are all too large or all too small, are in doubt together."""

import math
from dataclasses import replace
from functools import reduce

import pytest

from pipeproof.judging.leads import Leads
from pipeproof.judging.tolerance import BF16, Floor

FLOOR = Floor(0.004, 0.004, 0.1, BF16, led=0.006)


def joined(*factors: float | None, floor: Floor | None = FLOOR) -> Leads:
    return reduce(Leads.joined, (Leads.one(k, factor, floor) for k, factor in enumerate(factors)), Leads())


@pytest.mark.parametrize(("factors", "times"), [((1.01, 1.02, 1.007, 1.012), "1.007 to 1.02")])
def test_all_that_lead_one_way_are_in_doubt(factors: tuple[float, ...], times: str) -> None:
    assert f"all are {times} times what is due" in joined(*factors).doubt
    below = [1 / one for one in factors]
    assert f"all are {min(below):.4g} to {max(below):.4g} times what is due" in joined(*below).doubt


@pytest.mark.parametrize("factors", [(1.01, 1.02, 0.99, 1.01), (1.01, 1.02, 1.005, 1.01), (1.01, 1.02, 1.01)])
def test_either_way_or_no_farther_than_rounding_leads_or_of_too_few_they_are_not(factors: tuple[float, ...]) -> None:
    assert not joined(*factors).doubt


def test_one_that_is_right_to_the_bit_clears_the_others_and_one_that_is_nothing_does_not() -> None:
    led = joined(1.01, 1.01, 1.01, 1.01)
    assert led.doubt
    assert not led.joined(Leads.one("exact", 1.0)).doubt
    assert led.joined(Leads.one("zero", None)).doubt
    assert led.joined(Leads.one("rounding alone", 7.0, replace(FLOOR, size=1.0))).doubt


def test_of_one_parameter_on_many_ranks_it_may_be_chance() -> None:
    assert not reduce(Leads.joined, [Leads.one("w", 1.01, FLOOR)] * 9).doubt


def test_where_nobody_measured_how_far_rounding_leads_nothing_is_said() -> None:
    assert not joined(1.01, 1.01, 1.01, 1.01, floor=replace(FLOOR, led=math.inf)).doubt
