"""Losses that are multiplied and gradients that are divided by as much are meant so; what is not divided is wrong."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof import Composed, check_step
from pipeproof.judging.verdict import Verdict
from pipeproof.observers.sketch import sketch
from pipeproof.records.by_hand import Addends, agreed_times, are_divided, divided_by, sizes_of
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.pipeline_here import DATA, MSE, Job, layers


def checked(times: float, divided: dict[int, float]) -> Verdict:
    """A step whose losses are multiplied, and the gradients of whose stages are ``divided``, by stage."""
    stages = layers(torch.tanh, torch.sin, torch.tanh)
    with check_step(dict(enumerate(stages)), DATA, against=Composed(MSE), rename="{}.{}".format) as check:
        Job(stages, times=times).step()
        for stage, by in divided.items():
            for one in stages[stage].parameters():
                assert one.grad is not None
                one.grad.div_(by)
        check.gradients()
    return check.verdict


@pytest.mark.parametrize("times", [128.0, 1000.0, 0.25, 1 / 3, -1.0, 1.005])
def test_losses_multiplied_and_gradients_divided_pass_and_it_is_said(times: float) -> None:
    verdict = checked(times, dict.fromkeys(range(3), times))
    assert verdict.verdict == "pass", str(verdict)
    told = f"losses were multiplied by {times:g} and gradients divided by it: that was taken as meant"
    assert verdict.law("boundaries").note == told


@pytest.mark.parametrize("stages", [{0}, {1}, {2}, {0, 1}])
def test_stages_whose_gradients_are_not_divided_are_named(stages: set[int]) -> None:
    verdict = checked(128.0, {other: 128.0 for other in range(3) if other not in stages})
    assert [law.name for law in verdict.laws if law.outcome == "fail"] == ["gradient"], str(verdict)
    assert {(cause.kind, cause.stage) for cause in verdict.cause} == {("scale", stage) for stage in stages}


def test_losses_that_are_multiplied_alone_are_wrong() -> None:
    verdict = checked(4.0, {})
    assert (verdict.cause[0].kind, verdict.cause[0].action) == ("scale", "2B0"), str(verdict)
    assert "taken as meant" not in str(verdict)


def test_what_last_stages_tell_must_be_alike() -> None:
    assert agreed_times([None, 127.9999999, 128.0000001]) == 128.0
    assert agreed_times([None, 1 / 127.9999999]) == 1 / 128
    assert agreed_times([2.0, 4.0]) is agreed_times([None]) is agreed_times([2.0, -2.0]) is None


def test_gradients_are_divided_where_most_are_or_any_exactly() -> None:
    assert are_divided([1 / 128, 1 / 128, 1.0], 128.0)
    assert are_divided([4.0, 4.0], 0.25)
    assert are_divided([1.0, 1.0, 1 / 128], 128.0)
    assert not are_divided([1.0, 1.0, 1 / 100], 128.0)
    assert are_divided([-1.0, -1.0], -1.0)
    assert not are_divided([1.0, 1.0], -1.0)
    assert not are_divided([], 128.0)


def addends(given: Tensor | None, seen: Tensor, at: str = "") -> Addends:
    return Addends(0, None if given is None else {"w": sketch(given)}, {("w", at): sketch(seen)})


def test_sizes_are_of_the_sums_of_all_replicas() -> None:
    one, other = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).unbind()
    both = one + other
    alike = [addends(one, both / 8), addends(other, -both)]
    assert sizes_of(alike, together=1) == pytest.approx([1 / 8, -1.0], rel=1e-6)
    low, high = both.clone(), both.clone()
    low[32:], high[:32] = 0, 0
    parts = [addends(one, low / 2, "low"), addends(other, high / 2, "high")]
    assert sizes_of(parts, together=1) == pytest.approx([0.5], rel=1e-6)
    assert sizes_of([addends(one, one / 4), addends(one, one / 4)], together=2) == pytest.approx([0.25, 0.25], rel=1e-6)
    assert not sizes_of([addends(one, both), addends(None, both)], together=1)


def test_the_number_that_sums_are_divided_by_is_what_any_is_exactly_or_most_nearly() -> None:
    assert divided_by([1 / 2, 1 / 8], [2.0, 1.0, 8.0]) == 8.0
    assert divided_by([0.9, 0.8, 1 / 7], [2.0, 1.0, 8.0]) == 1.0
    assert divided_by([], [2.0, 1.0, 8.0]) == 2.0


def negated(context: RankContext, averaged: bool) -> Verdict:
    """Two stages in replicas, each on one rank: all losses are negated, and gradients divided at last."""
    stages, replica = layers(torch.tanh, torch.sin), context.rank
    data = [(x + replica, target) for x, target in DATA]
    whole = len(data) * (1 if averaged else context.ranks)
    with check_step(dict(enumerate(stages)), data, against=Composed(MSE), rename="{}.{}".format) as check:
        Job(stages, data, times=-1.0, late=whole).step()
        for one in (one for stage in stages for one in stage.parameters()):
            assert one.grad is not None
            dist.all_reduce(one.grad)
            one.grad /= context.ranks if averaged else 1
        check.gradients()
    return check.verdict


@pytest.mark.parametrize("averaged", [True, False])
def test_replicas_that_divide_at_last_have_no_wrong_factor_where_losses_are_wrong(
    averaged: bool, simulated: World
) -> None:
    verdict = simulated.run(negated, averaged, ranks=2)[0]
    assert {(cause.kind, cause.stage) for cause in verdict.cause} == {("sign", 1)}, str(verdict)
