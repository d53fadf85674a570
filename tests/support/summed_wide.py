"""A step in bf16 that adds its gradients up in fp32, and what may go wrong with some of them."""

from typing import Any

import torch

from pipeproof import StepResult, watch
from tests.support.steps import loss_fn


def summed_wide(
    model: Any, microbatches: list[Any], *, narrow: str | None = None, lost: int | None = None, given: torch.dtype
) -> StepResult:
    """Hand gradients back in the type ``given``.

    What begins with ``narrow`` is rounded to bf16 at each addition; of the microbatch ``lost`` nothing is added.
    """
    stage, losses = watch(model), []
    totals = {one: torch.zeros(one.shape) for one in model.parameters()}
    for m, (x, target) in enumerate(microbatches):
        losses.append(loss_fn(stage(x), target))
        (losses[-1] / len(microbatches)).backward()
        for name, one in model.named_parameters():
            totals[one] += 0 if m == lost else one.grad
            one.grad = None
            if narrow is not None and name.startswith(narrow):
                totals[one] = totals[one].bfloat16().float()
    gradients = {one: total.to(given) for one, total in totals.items()}
    return StepResult([stage], [loss.item() for loss in losses], gradients=gradients)
