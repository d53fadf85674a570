"""A learning rate that a scheduler sets, beside the reference's."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.foreign import WhiteBox
from tests.support.golden import golden
from tests.support.steps import WIDTH, loss_fn, pairs

STEPS = ["train", "accumulate", "train", "eval", "train", "train"]


def build() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))


def halved(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, StepLR(optimizer, step_size=2, gamma=0.5)  # so that it has to know the steps before


def warmed_up(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def from_zero(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Its first step moves nothing, and so shows nothing; the others do."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, LambdaLR(optimizer, lambda step: step / 4)


def run(model: nn.Module, operations: Iterator[Any], *, made: Any, times: int = 1) -> Iterator[Any]:
    """Trains ``model`` with what is ``made`` of it; the scheduler steps so many ``times`` after each update."""
    optimizer, scheduler = made(model)
    for operation, microbatches in operations:
        model.train(operation != "eval")
        losses = []
        for x, target in microbatches:
            loss = loss_fn(model(x), target)
            if operation != "eval":
                (loss / len(microbatches)).backward()
            losses.append(loss.item())
        if operation == "train":
            optimizer.step()
            for _ in range(times):
                scheduler.step()
        yield model, losses
        if operation == "train":
            optimizer.zero_grad()


def judged(whitebox: WhiteBox, step: Any, optimizer: Any, steps: Any = STEPS) -> Verdict:
    microbatches = pairs(2 * len(steps))
    return whitebox.validate(
        step,
        reference=build,
        microbatches=microbatches,
        ranks=1,
        loss_fn=loss_fn,
        optimizer=optimizer,
        contract=Contract(operations=steps),
    )


@pytest.mark.parametrize("made", [halved, warmed_up, from_zero])
def test_rates_are_those_of_the_scheduler(whitebox: WhiteBox, made: Any) -> None:
    verdict = judged(whitebox, partial(run, made=made), made)
    assert verdict.verdict == "pass", verdict
    assert verdict.law("updated-parameters").outcome == "pass"


@pytest.mark.parametrize("times", [0, 2])  # it is forgotten, or steps once for each microbatch
def test_a_scheduler_that_does_not_step_once_is_seen_in_the_update(whitebox: WhiteBox, times: int) -> None:
    verdict = judged(whitebox, partial(run, made=warmed_up, times=times), warmed_up)
    assert verdict.verdict == "fail"
    assert [cause.kind for cause in verdict.cause] == ["update"], verdict
    assert {one.law for one in verdict.mismatches} == {"updated-parameters"}
    assert "operation 3" in verdict.details, verdict
    golden(verdict.cause[0].detail.rpartition(" and ")[2])


def test_one_step_is_made_by_a_pair_too(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, partial(run, made=halved), halved, ["train"])
    assert verdict.law("updated-parameters").outcome == "pass", verdict


def no_optimizer(model: nn.Module) -> Any:
    return halved(model)[::-1]


def no_scheduler(model: nn.Module) -> Any:
    return halved(model)[0], None


@pytest.mark.parametrize("made", [no_optimizer, no_scheduler])
def test_what_is_no_optimizer_is_said(whitebox: WhiteBox, made: Any) -> None:
    verdict = judged(whitebox, partial(run, made=halved), made, ["train"])
    assert verdict.verdict == "unknown"
    golden(verdict.stopped.rpartition(" (")[0])
