"""Losses that are multiplied and gradients that are divided by as much are meant so; what is not divided is wrong."""

import pytest
import torch

from pipeproof import Composed, check_step
from pipeproof.judging.verdict import Verdict
from pipeproof.records.by_hand import agreed_times, are_divided
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
