"""What a step's gradients were added to is no part of it, and is known where it was there."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipeproof.foreign import WhiteBox, watch
from tests.support.steps import blocks, loss_fn, pairs


def test_gradients_that_were_there_before_the_step_are_known(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        stage = watch(model)
        losses = [loss_fn(stage(x), target) for x, target in microbatches]
        for loss in losses:
            (loss / len(microbatches)).backward()
        return stage, [loss.item() for loss in losses]

    data = pairs(4, rows=6)
    verdict = whitebox.validate(step, reference=partial(blocks, seed=3), microbatches=data, ranks=1, loss_fn=loss_fn)
    assert verdict.verdict == "fail", str(verdict)
    assert [cause.kind for cause in verdict.cause] == ["stale-gradient"], str(verdict)
    assert verdict.cause[0].detail == "what was there before the step was added, 1 times"


def test_what_was_there_on_one_replica_alone_is_told_of_its_rank(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        if dist.get_rank() == 1:
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
        stage = watch(model)
        losses = [loss_fn(stage(x), target) for x, target in microbatches]
        for loss in losses:
            (loss / len(microbatches)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        return stage, [loss.item() for loss in losses]

    data, build = pairs(4, rows=6), partial(blocks, seed=3)
    verdict = whitebox.validate(step, reference=build, microbatches=data, ranks=[0, 1], loss_fn=loss_fn)
    assert [(cause.kind, cause.rank) for cause in verdict.cause] == [("stale-gradient", 1)], str(verdict)
    assert verdict.cause[0].detail == "what was there before the step was added, 0.5 times"
