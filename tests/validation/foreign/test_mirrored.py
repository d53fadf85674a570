"""Pipelines that run both ways: ranks hold replicas of stages at mirrored places, and that is no wrong partition."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from validation.foreign import WhiteBox, watch
from validation.judging.verdict import Verdict

COUNT = 4


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Sequential(nn.Linear(5, 5), nn.Tanh()))


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 5, generator=draw), torch.randn(6, 5, generator=draw)) for _ in range(COUNT)]


def both_ways(stages: list[nn.Module], microbatches: list[Any], wrong: int | None = None) -> float:
    """Even microbatches enter at rank 0, odd ones at rank 1; each goes through the other rank's second stage.

    Both ranks know the loss of the step. ``wrong``: the microbatch that comes in at twice its size.
    """
    rank, total = dist.get_rank(), torch.zeros(())
    for m, (x, target) in enumerate(microbatches):
        if m % 2 == rank:
            y = stages[0](2 * x if m == wrong else x)
            dist.send(y.detach(), 1 - rank)
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1 - rank)
            y.backward(gradient)
        else:
            received = torch.empty(6, 5)
            dist.recv(received, 1 - rank)
            loss = loss_fn(stages[1](received.requires_grad_()), target) / COUNT
            loss.backward()
            dist.send(received.grad, 1 - rank)
            total += loss.detach()
    dist.all_reduce(total)
    return total.item()


def judged(
    whitebox: WhiteBox,
    *,
    watched: bool,
    summed: tuple[int, ...] = (0, 1),
    held: tuple[int, ...] = (0, 1),
    wrong: int | None = None,
) -> Verdict:
    def step(model: Any, microbatches: list[Any]) -> Any:
        stages = [watch(stage) if watched else stage for stage in model]
        loss = both_ways(stages, microbatches, wrong)
        for stage in summed:
            for parameter in stages[stage].parameters():
                dist.all_reduce(parameter.grad)
        return [stages[stage] for stage in held], loss

    return whitebox.validate(step, reference=build_model, microbatches=data(), ranks=2, loss_fn=loss_fn)


@pytest.mark.parametrize("watched", [True, False])
def test_mirrored_stages_are_replicas(whitebox: WhiteBox, watched: bool) -> None:
    verdict = judged(whitebox, watched=watched)
    assert verdict.verdict == "pass", str(verdict)
    assert verdict.law("replicas").checked == 4


@pytest.mark.parametrize("watched", [True, False])
def test_a_mirrored_stage_that_was_not_summed(whitebox: WhiteBox, watched: bool) -> None:
    (cause,) = judged(whitebox, watched=watched, summed=(0,)).cause
    assert (cause.kind, cause.stage) == ("not-reduced", 1)
    assert "rank 0 has the gradient of its own microbatches 1, 3 alone" in cause.detail


def test_a_stage_that_all_ranks_hold_while_nobody_holds_another_is_a_wrong_partition(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, watched=False, held=(0,))
    assert verdict.verdict == "fail"
    assert [cause.kind for cause in verdict.cause] == ["partition"]


def test_a_model_that_nobody_cut_is_a_wrong_partition(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = [loss_fn(model(x), target) for x, target in microbatches]
        (sum(losses) / COUNT).backward()
        return model, [loss.item() for loss in losses]

    verdict = whitebox.validate(step, reference=build_model, microbatches=data(), ranks=2, loss_fn=loss_fn)
    assert verdict.verdict == "fail"
    assert [cause.kind for cause in verdict.cause] == ["partition"]


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_what_is_wrong_is_on_the_rank_that_the_microbatch_was_on(whitebox: WhiteBox, wrong: int) -> None:
    verdict = judged(whitebox, watched=True, wrong=wrong)
    first = next(one for one in verdict.mismatches if one.law == "boundaries")
    assert (first.rank, first.stage, first.microbatch) == (wrong % 2, 0, wrong), str(verdict)
    assert {cause.rank for cause in verdict.cause if cause.microbatches == (wrong,)} == {wrong % 2}, str(verdict)
