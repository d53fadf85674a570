"""Stages that run again change nothing of the job's, whatever their loss reaches."""

import torch
from torch import Tensor, nn

from pipeproof import Composed, check_step
from tests.support.pipeline_here import DATA, MSE, Job, layers


def named(stage: int, name: str) -> str:
    return f"{stage}.{name}"


def test_a_loss_may_have_weights_of_its_own_and_look_at_a_stages() -> None:
    stages, own = layers(torch.tanh, torch.sin), nn.Parameter(torch.tensor(2.0))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return MSE(output * own, target) + sum(one.square().sum() for one in stages[1].parameters()) * 0.1

    with check_step(dict(enumerate(stages)), DATA, against=Composed(loss_fn), rename=named) as check:
        Job(stages, loss_fn=loss_fn).step()
        before = own.grad, own.grad.clone() if own.grad is not None else None
        check.gradients()
    assert own.grad is before[0]
    assert own.grad is not None
    assert torch.equal(own.grad, before[1])  # type: ignore[arg-type]  # it is there
    assert check.verdict.verdict == "pass", str(check.verdict)
