"""Losses of a foreign step that are wrong while its gradients are right: a wrong report, or nobody knows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support import two_ranks
from tests.support.golden import golden
from tests.support.steps import loss_fn, pairs

COUNT = 4


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


data = partial(pairs, COUNT, rows=6, width=5, to=3, seed=1)


def replicated(model: Any, microbatches: list[Any]) -> Any:
    """A right step of a replica, which reports the mean of its own losses."""
    losses = []
    for x, target in microbatches:
        loss = loss_fn(model(x), target)
        (loss / COUNT).backward()
        losses.append(loss.item())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return model, sum(losses) / len(losses)


def judged(whitebox: WhiteBox, report: Callable[[list[float]], Any]) -> Verdict:
    """A right step that makes ``report`` of its losses."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = []
        for x, target in microbatches:
            loss = loss_fn(model(x), target)
            (loss / COUNT).backward()
            losses.append(loss.item())
        return model, report(losses)

    return whitebox.validate(step, reference=build_model, microbatches=data(), ranks=1, loss_fn=loss_fn)


@pytest.mark.parametrize(
    "report",
    [
        lambda losses: [4 * loss for loss in losses],
        lambda losses: losses[::-1],
        lambda losses: [losses[0]] * COUNT,
        sum,
        lambda losses: [torch.tensor(loss).half().item() for loss in losses],
    ],
)
def test_what_is_made_of_right_losses_is_a_wrong_report(
    whitebox_here: WhiteBox, report: Callable[[list[float]], Any]
) -> None:
    verdict = judged(whitebox_here, report)
    (cause,) = verdict.causes
    assert cause.kind == "report"
    golden(cause.detail, numbers=False)


@pytest.mark.parametrize(
    "report",
    [
        lambda losses: [loss + 0.1 for loss in losses],
        lambda losses: sum(losses) + 0.1,
        lambda losses: [loss * 1.0003 for loss in losses[:2]] + losses[2:],
    ],
)
def test_of_other_losses_nobody_knows_whether_they_were_computed(
    whitebox_here: WhiteBox, report: Callable[[list[float]], Any]
) -> None:
    """As where a term was lost that no gradient comes from."""
    verdict = judged(whitebox_here, report)
    assert (verdict.outcome, verdict.causes) == ("fail", ())
    golden(verdict.undecided[0], numbers=False)


@pytest.mark.sweep
def test_a_loss_that_was_added_up_over_the_ranks_is_a_wrong_report(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        stage = two_ranks.half(model)
        losses = two_ranks.all_forward_all_backward(stage, microbatches)
        return stage, None if losses is None else 2 * sum(losses) / two_ranks.COUNT

    (cause,) = two_ranks.judged(whitebox, step, two_ranks.plain).causes
    assert (cause.kind, cause.rank) == ("report", 1)
    golden(cause.detail, numbers=False)


@pytest.mark.parametrize("none", [None, []])
def test_a_step_without_losses_does_not_pass(whitebox_here: WhiteBox, none: Any) -> None:
    verdict = judged(whitebox_here, lambda losses: none)
    assert (verdict.outcome, verdict.law("loss").outcome) == ("unknown", "unknown")


def test_the_mean_of_a_replica_is_told_from_that_of_all(whitebox: WhiteBox) -> None:
    verdict = whitebox.validate(replicated, reference=build_model, microbatches=data(), ranks=[0, 1], loss_fn=loss_fn)
    assert {m.law for m in verdict.mismatches} == {"loss"}
    (cause,) = verdict.causes
    told = "each replica reports the mean of its own microbatches; as one number the whole step's is expected"
    assert (cause.kind, told in cause.detail) == ("report", True)


@pytest.mark.parametrize("said", [(0, 0), (0, 1, 2), (0, 1, 2, 3, 3)], ids=["one twice", "one missing", "one more"])
def test_an_order_that_the_step_hands_back_says_nothing_of_gradients(
    whitebox_here: WhiteBox, said: tuple[int, ...]
) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = [loss_fn(model(x), target) for x, target in microbatches]
        (torch.stack(losses).sum() / COUNT).backward()
        return model, [loss.item() for loss in losses], None, [f"0{kind}{m}" for kind in "FB" for m in said]

    verdict = whitebox_here.validate(step, reference=build_model, microbatches=data(), ranks=1, loss_fn=loss_fn)
    (cause,) = verdict.causes
    assert (cause.kind, cause.rank, cause.stage) == ("order", 0, 0), str(verdict)
    assert f"forward of {list(said)}" in cause.detail
