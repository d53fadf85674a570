"""Losses of a step in bf16 are as exact as their own type: with the same output a loss function gives the same bits."""

import pytest
import torch
from torch import Tensor, nn

from pipeproof import Composed, check_step

WIDTH, ROWS, COUNT = 8, 4, 3


def in_fp32(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


def as_it_is(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


@pytest.mark.parametrize(
    ("loss_fn", "factor", "outcome"),
    [
        (in_fp32, 1.0, "pass"),
        (in_fp32, 1.002, "unknown"),
        (in_fp32, 1.2, "fail"),
        (as_it_is, 1.0, "pass"),
        (as_it_is, 1.2, "fail"),
    ],
)
def test_a_loss_that_is_off_by_more_than_its_type_rounds_is_no_rounding(
    loss_fn: object, factor: float, outcome: str
) -> None:
    torch.manual_seed(0)
    stage = nn.Linear(WIDTH, WIDTH).bfloat16()
    data = [(torch.randn(2, ROWS, WIDTH).bfloat16()).unbind() for _ in range(COUNT)]
    with check_step(stage, data, against=Composed(loss_fn)) as check:  # type: ignore[arg-type]
        losses = [loss_fn(stage(x), target) for x, target in data]  # type: ignore[operator]
        for loss in losses:
            (loss / COUNT).backward()
        check.gradients()
        check.report(losses=[factor * loss.item() for loss in losses])
    assert check.verdict.law("loss").outcome == outcome, str(check.verdict)
