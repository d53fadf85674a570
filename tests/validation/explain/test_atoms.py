"""Gradients of a bf16 model that are added up in another type: what rounding hides, and what it does not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import StepResult
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden

WIDTH, COUNT = 16, 6


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


def build() -> nn.Module:
    torch.manual_seed(2)
    blocks = (nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*blocks).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("count", "divisor", "twice", "dtype", "outcome", "causes"),
    [
        (COUNT, COUNT, "", torch.float32, "pass", []),  # compared with sums in that type
        (COUNT, 1, "", torch.float32, "fail", [("scale", None, COUNT)]),  # though rounding hides each microbatch
        (COUNT, COUNT, "1.1.weight", torch.float32, "fail", [("scale", "1.1.weight", 2.0)]),
        (24, 24, "", torch.bfloat16, "unknown", []),  # rounding may hide a microbatch: nothing is beyond it
    ],
    ids=["right", "a factor", "one twice", "narrowed"],
)
def test_rounding_of_sums(
    whitebox_here: WhiteBox, count: int, divisor: float, twice: str, dtype: torch.dtype, outcome: str, causes: list[Any]
) -> None:
    """Added up in fp32; the parameter ``twice`` is doubled, and all are handed back in ``dtype``."""

    def step(model: nn.Module, microbatches: list[Any]) -> StepResult:
        sums, losses = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}, []
        for x, target in microbatches:
            loss = loss_fn(model(x), target)
            (loss / divisor).backward()
            losses.append(loss.item())
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                sums[name] += parameter.grad * (1 + (name == twice))
                parameter.grad = None
        return StepResult(model, losses, gradients={name: total.to(dtype) for name, total in sums.items()})

    draw = torch.Generator().manual_seed(1)
    data = [tuple(torch.randn(2, 8, WIDTH, generator=draw).to(torch.bfloat16)) for _ in range(count)]
    verdict = whitebox_here.validate(step, reference=build, microbatches=data, ranks=1, loss_fn=loss_fn)
    assert (verdict.outcome, verdict.tier == "bitwise") == (outcome, outcome == "pass"), verdict
    assert [(cause.kind, cause.parameter, cause.factor) for cause in verdict.causes] == causes
    golden("\n".join(verdict.undecided) or "nothing is open", numbers=False)
