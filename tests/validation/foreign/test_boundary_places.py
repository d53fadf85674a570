"""Gradients at the boundaries of replicas' stages: all are those of a replica, or all are those of the whole step."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof.core.verdict import Verdict
from pipeproof.foreign import WhiteBox, watch
from tests.support.steps import blocks, loss_fn, pairs


def step(model: Any, microbatches: list[Any], *, times: float, each: bool) -> Any:
    """Two stages by two replicas; what the second stage hands on is multiplied.

    ``each``: a replica divides by its own microbatches, and replicas are averaged; else by all, and they are summed.
    """
    rank = dist.get_rank()
    number, replica = rank // 2, rank % 2
    groups = [dist.new_group([2 * k, 2 * k + 1]) for k in range(2)]
    stage, count = watch(model[2 * number : 2 * number + 2]), len(microbatches) * (1 if each else 2)
    losses = []
    for x, target in microbatches:
        if number == 0:
            made = stage(x)
            dist.send(made.detach(), replica + 2)
            gradient = torch.empty_like(made)
            dist.recv(gradient, replica + 2)
            made.backward(gradient)
        else:
            given = torch.empty_like(x)
            dist.recv(given, replica)
            loss = loss_fn(stage(given.requires_grad_()), target)
            (loss / count).backward()
            assert given.grad is not None
            dist.send(times * given.grad, replica)
            losses.append(loss.item())
    for parameter in stage.parameters():
        dist.all_reduce(parameter.grad, group=groups[number])
        parameter.grad /= 2 if each else 1
    return stage, losses or None


def judged(whitebox: WhiteBox, times: float, *, each: bool) -> Verdict:
    return whitebox.validate(
        partial(step, times=times, each=each),
        reference=partial(nn.Sequential, *blocks()),
        microbatches=pairs(4),
        ranks={"pp": 2, "dp": 2},
        loss_fn=loss_fn,
    )


@pytest.mark.parametrize("each", [True, False])
def test_either_scale_passes(whitebox: WhiteBox, each: bool) -> None:
    verdict = judged(whitebox, 1.0, each=each)
    assert verdict.verdict == "pass", verdict
    assert verdict.law("boundaries").outcome == "pass"


@pytest.mark.parametrize(("times", "each"), [(0.5, True), (2.0, True), (2.0, False), (0.5, False)])
def test_one_scale_in_one_stage_and_another_in_the_next_is_a_factor(
    whitebox: WhiteBox, times: float, each: bool
) -> None:
    verdict = judged(whitebox, times, each=each)
    (cause,) = verdict.cause
    assert (cause.kind, cause.stage, cause.factor) == ("scale", 0, pytest.approx(times))
    assert f"{times:g} times the expected" in cause.detail
    assert "wrong-message" not in {kind for one in verdict.ruled_out for kind in one.kinds}
