"""Gradients that pass one by one, and are all too large or all too small, are in doubt together."""

import math
from dataclasses import replace
from functools import reduce

import pytest
import torch
from torch import nn

from pipeproof.core.leads import Leads
from pipeproof.core.limits import BF16, FP16
from pipeproof.core.tolerance import Floor
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step
from tests.support.golden import golden

M = 4
loss_fn = nn.functional.mse_loss


def doubts(leads: Leads, *, agree: bool = False) -> str:
    return "; ".join(leads.doubts(losses_agree=agree))


FLOOR = Floor(0.004, 0.004, 0.1, BF16, led=0.006)


FAR_IN_BF16 = Leads.one("far", 1.0, FLOOR)


def joined(*factors: float | None, floor: Floor | None = FLOOR) -> Leads:
    return reduce(Leads.join, (Leads.one(k, factor, floor) for k, factor in enumerate(factors)), Leads())


def test_all_that_lead_one_way_are_in_doubt() -> None:
    factors = (1.01, 1.02, 1.007, 1.012)
    golden(doubts(joined(*factors)))
    golden(doubts(joined(*(1 / one for one in factors))))


@pytest.mark.parametrize("factors", [(1.01, 1.02, 0.99, 1.01), (1.01, 1.02, 1.005, 1.01), (1.01, 1.03, 1.01), (1.02,)])
def test_either_way_or_no_farther_than_rounding_leads_or_of_too_few_they_are_not(factors: tuple[float, ...]) -> None:
    assert not doubts(joined(*factors))


def test_two_that_lead_by_the_very_same_factor_are_in_doubt_where_nothing_is_allowed() -> None:
    strict = replace(FLOOR, led=0.0)
    assert doubts(joined(1.01, 1.01, floor=strict))
    assert not doubts(joined(1.01, 1.02, floor=strict))


def test_one_that_is_right_to_the_bit_clears_the_others_and_one_that_is_nothing_does_not() -> None:
    led = joined(1.01, 1.01, 1.01, 1.01)
    assert doubts(led)
    assert not doubts(led.join(Leads.one("exact", 1.0)))
    assert doubts(led.join(Leads.one("zero", None)))
    assert doubts(led.join(Leads.one("rounding alone", 7.0, replace(FLOOR, size=1.0))))


def test_half_that_lead_are_in_doubt_where_the_others_may_be_as_far_off() -> None:
    loose = replace(FLOOR, led=0.03)
    half = joined(1.01, 1.01, 1.011, 1.009)
    others = [Leads.one(f"loose {k}", 1.002, loose) for k in range(4)]
    some = reduce(Leads.join, others, half)
    golden(doubts(some))
    assert not doubts(some.join(Leads.one("more", 1.002, loose))), "fewer than half"
    assert not doubts(some.join(Leads.one("tight", 1.002, FLOOR))), "that one is not"
    assert not doubts(some.join(Leads.one("wide", 1.00001, Floor(0.0, 0.0, 0.1)))), "in fp32 none leads so far"


def test_two_are_enough_where_one_factor_may_be_that_of_all() -> None:
    assert doubts(joined(1.01, 1.011))
    assert not any(doubts(one) for one in (joined(1.01, 1.03), joined(1.01, 0.99), joined(1.014, 1.014, 1.0, 1.0)))


def test_of_one_parameter_on_many_ranks_it_may_be_chance() -> None:
    assert not doubts(reduce(Leads.join, [Leads.one("w", 1.01, FLOOR)] * 9))


def test_where_nobody_measured_how_far_rounding_leads_nothing_is_said() -> None:
    assert not doubts(joined(1.01, 1.01, 1.01, 1.01, floor=replace(FLOOR, led=math.inf)))


def test_one_that_is_off_where_the_others_are_exact_is_in_doubt() -> None:
    """Other kernels would show everywhere."""
    coarse = replace(FLOOR, sums=Floor(0.0, 0.0, 0.1))
    far, near = Leads.one("far", 1.0, coarse), Leads.one("near", 1.0, Floor(0.0, 1e-7, 0.1))
    golden(doubts(far.join(near)))
    assert doubts(far.join(Leads.one("to the bit", 1.0)))
    golden(doubts(far, agree=True))
    in_fp16 = Leads.one("far", 1.0, replace(coarse, precision=FP16))
    for some in (in_fp16.join(near), far, near, far.join(Leads.one("zero", None)), FAR_IN_BF16.join(near)):
        assert not doubts(some)


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
        check.report(losses=[one.item() for one in (losses[::-1] if reverse else losses)])
    law = check.verdict.law("gradient")
    assert (check.verdict.outcome, law.outcome) == (outcome, outcome), str(check.verdict)
    assert (law.exact < law.checked, "check what losses are divided by" in law.note) == (True, outcome == "unknown")
