"""What a step's gradients were added to is no part of it, and is known where it was there."""

from functools import partial
from typing import Any

import torch

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
