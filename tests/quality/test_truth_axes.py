"""Faults of parallelism inside a stage: some are named here, what is right is silent; all are in the campaign."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from axis_faults import PLANTS, SOUND, step
from axis_planting import finished, having, times
from truth_axes import FAULTS, STACKS, Along, axes
from truth_check import check

from pipeproof.core.cause import KINDS
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.primitives.stacked import validate_stack
from pipeproof.wings.primitives.stacks import Stack
from tests.support.sweeps import some

HOLDS = {
    "tp: input gradients not reduced": "ranks 0, 1 each keep their own part: the sum of these is",
    "tp: queries' input gradients not reduced": "the backward first goes wrong at 2.attention_norm.bias",
    "tp: mean of input gradients": "the gradient of the input of each feedforward.up is multiplied by 0.5",
    "tp: outputs reduced twice": "weights are right; no factor gives the gradients",
    "tp: all times tp": "2 = the number of ranks",
    "tp: shards of a weight exchanged": "has its own, put in another order",
    "sp: gathered without reduction": "the backward first goes wrong at 2.norm.bias (stage 0): the 7 parameters",
    "ep: no gradient from experts": "the gradient of the input of each mixture.experts.*.up is multiplied by 0",
    "ep: norm without experts": "parameters that fewer ranks hold than others are left out",
    "cp: parts not reduced": "stage 0: ranks 0, 1 each keep their own part: the sum of these is expected",
    "cp: losses of its own part": "report their own parts', and the mean of these is right",
    "cp: norm over the world": "parameters that several ranks hold are counted once for each rank",
}
SIMILAR = (  # to others
    "tp: queries' input gradients not reduced",
    "tp: mean of input gradients",
    "tp: outputs reduced twice",
    "tp: all times tp",
    "ep: norm without experts",
)
SILENT = ("tp: right, input gradients reduced by hand", "cp: right, zig-zag parts")


def test_every_fault_is_planted_once_and_has_a_truth() -> None:
    every = list(axes())
    assert len({one.title for one in every}) == len(every)
    assert {one.fault for one in every} == set(PLANTS)
    assert {kind for one in every for kind in one.truth.kinds} <= set(KINDS)
    assert sum(map(len, FAULTS.values())) >= 70
    assert sum(not one.truth.kinds for one in every) >= 15
    assert not {one.fault for one in every if one.truth.kinds} & {"", *SOUND}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("title", some(HOLDS, left=SIMILAR))
def test_a_fault_is_named(whitebox: WhiteBox, title: str) -> None:
    (one,) = (one for one in axes() if one.title == title)
    verdict = one.verdict(whitebox, watched=True)
    found = check(verdict, one.truth, one.counts)
    assert (found.caught, found.false) == (True, ()), found
    assert found.naming == ("unknown" if "goes wrong" in HOLDS[title] else "right"), found
    assert HOLDS[title] in verdict.details, verdict


@pytest.mark.sweep
@pytest.mark.parametrize("title", SILENT)
def test_what_is_right_in_another_order_passes(whitebox: WhiteBox, title: str) -> None:
    (one,) = (one for one in axes() if one.title == title)
    verdict = one.verdict(whitebox, watched=True)
    assert verdict.outcome == "pass", verdict
    assert verdict.law("initial-weights").checked == 74, "every rank's, those in shards too"


@pytest.mark.sweep
@pytest.mark.parametrize(("times_it", "outcome"), [(1 + 1e-6, "pass"), (1 + 1e-4, "fail")])
def test_a_gap_is_told_as_rounding_or_a_fault_by_number(whitebox: WhiteBox, times_it: float, outcome: str) -> None:
    found = _scaled(whitebox, times_it)
    assert found.law("gradient").outcome == outcome, found
    assert not found.causes or found.causes[0].parameter == "1.feedforward.up.weight"


def _scaled(whitebox: WhiteBox, factor: float) -> Verdict:
    """On a step of context parallelism that multiplies one gradient."""
    stack = STACKS["cp"]
    return validate_stack(stack, whitebox, step=partial(_with_one_scaled, stack=stack, factor=factor))


def _with_one_scaled(model: Any, given: Any, *, stack: Stack, factor: float) -> Any:
    with finished("cp", times(factor, having("1.feedforward.up.weight")))():
        return step(model, given, stack=stack, fault="", watched=False)


@pytest.mark.sweep
def test_a_first_wrong_parameter_that_is_another_is_false(whitebox: WhiteBox) -> None:
    (one,) = (one for one in axes() if one.title == "cp: keys' gradients not reduced")
    verdict = one.verdict(whitebox, watched=False)
    assert check(verdict, one.truth, one.counts, watched=False).false == ()
    elsewhere = Along("cp", one.fault, replace(one.truth, parameter=r"^1\."))
    (false,) = check(verdict, elsewhere.truth, one.counts, watched=False).false
    assert (false.role, "first wrong at" in false.why) == ("unknown", True)
