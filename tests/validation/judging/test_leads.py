"""Gradients that pass one by one, and are all too large or all too small, are in doubt together."""

import math
from dataclasses import replace
from functools import reduce

import pytest
import torch
from torch import nn

from pipeproof.judging.leads import Leads
from pipeproof.judging.tolerance import BF16, Floor
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step

M = 4
loss_fn = nn.functional.mse_loss

FLOOR = Floor(0.004, 0.004, 0.1, BF16, led=0.006)


def joined(*factors: float | None, floor: Floor | None = FLOOR) -> Leads:
    return reduce(Leads.joined, (Leads.one(k, factor, floor) for k, factor in enumerate(factors)), Leads())


def test_all_that_lead_one_way_are_in_doubt() -> None:
    factors, times = (1.01, 1.02, 1.007, 1.012), "1.007 to 1.02"
    assert f"all 4 that are not rounding alone are {times} times what is due" in joined(*factors).doubt
    below = [1 / one for one in factors]
    assert f"alone are {min(below):.4g} to {max(below):.4g} times what is due" in joined(*below).doubt


@pytest.mark.parametrize("factors", [(1.01, 1.02, 0.99, 1.01), (1.01, 1.02, 1.005, 1.01), (1.01, 1.03, 1.01), (1.02,)])
def test_either_way_or_no_farther_than_rounding_leads_or_of_too_few_they_are_not(factors: tuple[float, ...]) -> None:
    assert not joined(*factors).doubt


def test_one_that_is_right_to_the_bit_clears_the_others_and_one_that_is_nothing_does_not() -> None:
    led = joined(1.01, 1.01, 1.01, 1.01)
    assert led.doubt
    assert not led.joined(Leads.one("exact", 1.0)).doubt
    assert led.joined(Leads.one("zero", None)).doubt
    assert led.joined(Leads.one("rounding alone", 7.0, replace(FLOOR, size=1.0))).doubt


def test_half_that_lead_are_in_doubt_where_the_others_may_be_as_far_off() -> None:
    loose = replace(FLOOR, led=0.03)
    half = joined(1.01, 1.01, 1.011, 1.009)
    others = [Leads.one(f"loose {k}", 1.002, loose) for k in range(4)]
    some = reduce(Leads.joined, others, half)
    assert (
        "4 of the 8 that are not rounding alone are 1.009 to 1.011 times what is due, as the others may be"
        in some.doubt
    )
    assert not some.joined(Leads.one("more", 1.002, loose)).doubt, "fewer than half"
    assert not some.joined(Leads.one("tight", 1.002, FLOOR)).doubt, "that one is not"
    assert not some.joined(Leads.one("wide", 1.00001, Floor(0.0, 0.0, 0.1))).doubt, "in fp32 none leads so far"


def test_two_are_enough_where_one_factor_may_be_that_of_all() -> None:
    assert joined(1.01, 1.011).doubt
    assert not any(one.doubt for one in (joined(1.01, 1.03), joined(1.01, 0.99), joined(1.014, 1.014, 1.0, 1.0)))


def test_of_one_parameter_on_many_ranks_it_may_be_chance() -> None:
    assert not reduce(Leads.joined, [Leads.one("w", 1.01, FLOOR)] * 9).doubt


def test_where_nobody_measured_how_far_rounding_leads_nothing_is_said() -> None:
    assert not joined(1.01, 1.01, 1.01, 1.01, floor=replace(FLOOR, led=math.inf)).doubt


def narrow() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))).bfloat16()


@pytest.mark.parametrize(("factor", "reverse", "outcome"), [(1.012, False, "unknown"), (1.0, True, "pass")])
@pytest.mark.parametrize("beside", [True, False])
def test_gradients_in_bf16_that_are_all_too_large_do_not_pass_as_rounding(
    factor: float, reverse: bool, outcome: str, beside: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    given = [(torch.randn(8, 32, generator=draw).bfloat16(),) * 2 for _ in range(M)]
    model, record = narrow(), record_step(narrow(), given, loss_fn=loss_fn)
    with check_step(model, given, against=SingleDevice(narrow, loss_fn) if beside else record) as check:
        losses = [loss_fn(model(x), y) for x, y in (given[::-1] if reverse else given)]
        for loss in losses:
            (loss * factor / M).backward()
        check.gradients()
        check.report(losses=[one.item() for one in losses], in_order=False)
    law = check.verdict.law("gradient")
    assert (check.verdict.verdict, law.outcome) == (outcome, outcome), str(check.verdict)
    assert (law.exact < law.checked, "by what are losses divided?" in law.note) == (True, outcome == "unknown")
