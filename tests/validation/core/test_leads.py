"""Gradients that pass one by one, and are all too large or all too small, are in doubt together."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from pipeproof.core.leads import Lead, doubts
from pipeproof.core.limits import BF16, FP16
from pipeproof.core.tolerance import Floor
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_record import record_step
from tests.support.check_here import check_here
from tests.support.golden import golden
from tests.support.steps import blocks

M = 4
loss_fn = nn.functional.mse_loss


FLOOR = Floor(0.004, 0.004, 0.1, BF16, led=0.006)
LOOSE = replace(FLOOR, led=0.03)
COARSE = replace(FLOOR, sums=Floor(0.0, 0.0, 0.1))
NEAR = Lead.of("near", 1.0, Floor(0.0, 1e-7, 0.1))


def told(*leads: Lead, agree: bool = False) -> str:
    return "; ".join(doubts(leads, losses_agree=agree))


def of(*factors: float, floor: Floor = FLOOR) -> list[Lead]:
    return [Lead.of(k, factor, floor) for k, factor in enumerate(factors)]


HALF = [*of(1.01, 1.01, 1.011, 1.009), *(Lead.of(f"loose {k}", 1.002, LOOSE) for k in range(4))]


@pytest.mark.parametrize(
    "leads",
    [
        of(1.01, 1.02, 1.007, 1.012),
        of(1 / 1.01, 1 / 1.02, 1 / 1.007, 1 / 1.012),
        HALF,  # the others may be as far off
        of(1.01, 1.01, floor=replace(FLOOR, led=0.0)),
        of(1.01, 1.011),  # one factor may be that of both
        [Lead.of("far", 1.0, COARSE), NEAR],  # other kernels would show everywhere
        [Lead.of("far", 1.0, COARSE), Lead.of("to the bit", 1.0)],
    ],
    ids=["more", "less", "half", "bits", "two", "far", "far beside bits"],
)
def test_together_they_are_in_doubt(leads: list[Lead]) -> None:
    golden(told(*leads))


@pytest.mark.parametrize(
    "leads",
    [
        of(),
        of(1.01, 1.02, 0.99, 1.01),
        of(1.01, 1.02, 1.005, 1.01),
        of(1.01, 1.03, 1.01),
        of(1.02),
        of(1.01, 1.02, floor=replace(FLOOR, led=0.0)),
        of(1.01, 1.03),
        of(1.01, 0.99),
        of(1.014, 1.014, 1.0, 1.0),
        of(1.01, 1.01, 1.01, 1.01, floor=replace(FLOOR, led=math.inf)),  # how far rounding leads was not measured
        [*of(1.01, 1.01, 1.01, 1.01), Lead.of("exact", 1.0)],
        [*HALF, Lead.of("more", 1.002, LOOSE)],  # fewer than half
        [*HALF, Lead.of("tight", 1.002, FLOOR)],
        [*HALF, Lead.of("wide", 1.00001, Floor(0.0, 0.0, 0.1))],  # in fp32 none leads so far
        [Lead.of("w", 1.01, FLOOR)] * 9,  # of one parameter on many ranks it may be chance
        [Lead.of("far", 1.0, replace(COARSE, precision=FP16)), NEAR],
        [Lead.of("far", 1.0, COARSE)],
        [NEAR],
        [Lead.of("far", 1.0, FLOOR), NEAR],
    ],
)
def test_together_they_may_be_chance(leads: list[Lead]) -> None:
    assert not told(*leads)


def test_one_far_off_beside_exact_losses() -> None:
    golden(told(Lead.of("far", 1.0, COARSE), agree=True))
    assert not told(NEAR, agree=True)


def narrow() -> nn.Sequential:
    return blocks(3, width=32).bfloat16()


@pytest.mark.parametrize(("factor", "reverse", "outcome"), [(1.012, False, "unknown"), (1.0, True, "pass")])
@pytest.mark.parametrize("beside", [True, False])
def test_gradients_in_bf16_that_are_all_too_large_do_not_pass_as_rounding(
    factor: float, reverse: bool, outcome: str, beside: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    given = [(torch.randn(8, 32, generator=draw).bfloat16(),) * 2 for _ in range(M)]
    against = SingleDevice(narrow, loss_fn) if beside else record_step(narrow(), given, loss_fn=loss_fn)
    verdict = check_here(narrow(), given, against, order=range(M)[:: -1 if reverse else 1], factor=factor)
    law = verdict.law("gradient")
    assert (verdict.outcome, law.outcome) == (outcome, outcome), str(verdict)
    assert (law.exact < law.checked, "check what losses are divided by" in law.note) == (True, outcome == "unknown")
