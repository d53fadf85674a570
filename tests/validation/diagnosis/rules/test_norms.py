"""Norms that are others of the same gradients: where the mistake is said to be."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipeproof.foreign import WhiteBox
from tests.support.steps import blocks, loss_fn, pairs


@pytest.mark.parametrize(("stages", "place"), [(1, "everywhere"), (2, "rank 0, stage 1")])
def test_of_the_only_stage_nothing_is_said_as_a_place(whitebox: WhiteBox, stages: int, place: str) -> None:
    """The last stage's gradients are counted twice."""

    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = [loss_fn(model(x), target) for x, target in microbatches]
        (torch.stack(losses).sum() / len(losses)).backward()
        parts = [model] if stages == 1 else [model[:2], model[2:]]
        sizes = [nn.utils.get_total_norm([p.grad for p in part.parameters()]).item() for part in parts]
        return parts, [loss.item() for loss in losses], math.hypot(*sizes, sizes[-1])

    verdict = whitebox.validate(step, reference=blocks, microbatches=pairs(), ranks=1, loss_fn=loss_fn)
    (cause,) = verdict.cause
    assert (cause.kind, cause.place) == ("norm", place), str(verdict)
    assert f"stage {stages - 1}'s gradients are counted twice" in cause.detail
