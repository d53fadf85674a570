"""Stages that run again change nothing of the job's, whatever their loss reaches."""

from typing import Any

import torch
from torch import Tensor, nn

from pipeproof import Contract
from pipeproof.core.reason import Reason
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, MSE, Job, checked, layers


def test_a_loss_may_have_weights_of_its_own() -> None:
    stages, own = layers(torch.tanh, torch.sin), nn.Parameter(torch.tensor(2.0))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return MSE(output * own, target) + sum(one.square().sum() for one in stages[1].parameters()) * 0.1

    before = list[Any]()
    verdict = checked(Job(stages, loss_fn=loss_fn, change=lambda: before.extend((own.grad, own.grad.clone()))))
    assert own.grad is before[0]
    assert torch.equal(own.grad, before[1])
    assert verdict.outcome == "unknown", str(verdict)
    told = "the loss trains weights that no stage holds: let the last stage's module hold them: one of shape []"
    assert told in verdict.law("gradient").note


def test_a_gradients_hook_is_not_called_again() -> None:
    stages, calls = layers(torch.tanh, torch.sin), []
    stages[0].layer.weight.register_hook(lambda one: calls.append(one) or one)
    stages[1].layer.weight.register_hook(lambda one: one * 0.5)
    law = checked(Job(stages)).law("gradient")
    assert len(calls) == len(DATA)
    assert (law.outcome, law.left_out) == ("unknown", ("1.layer.weight",))
    assert Reason.HOOKS in law.reasons


def test_the_same_inputs_in_another_order_are_refused() -> None:
    data = [(torch.ones(4, 8), torch.full((4, 8), m / 4)) for m in range(3)]
    for given, outcome in ((data, "pass"), (data[::-1], "unknown")):
        verdict = checked(Job(layers(torch.tanh, torch.sin), data), given=given)
        assert verdict.outcome == outcome, str(verdict)
    golden(verdict.details.splitlines()[0])


def test_a_stage_without_gradients_is_told() -> None:
    told = "stage 0 has parameters to be trained, and none of its calls gives one a gradient: is its graph cut inside?"
    verdict = checked(Job(layers(torch.Tensor.detach, torch.tanh)))
    assert (verdict.outcome, verdict.law("presence").note) == ("pass", told), str(verdict)
    assert told not in str(checked(Job(layers(torch.sin, torch.tanh))))


class Unseen(nn.Module):
    """Runs its second call without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.set_grad_enabled(self.calls != 2):
            found: Tensor = super().__call__(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def test_a_call_without_gradients_is_dropped_there() -> None:
    verdict = checked(Job([Unseen(), *layers(torch.tanh)]))
    (cause,) = verdict.causes
    assert (cause.kind, cause.rank, cause.stage, cause.microbatches) == ("dropped", 0, 0, (1,)), str(verdict)
    assert not any("dropped" in one.kinds for one in verdict.ruled_out), "sums of what ran say nothing of what did not"


def test_a_microbatch_run_twice_is_doubled() -> None:
    verdict = checked(
        Job(layers(torch.tanh, torch.sin), [*DATA, DATA[0]]), given=DATA, contract=Contract(loss_divisor=4)
    )
    (cause,) = verdict.causes
    assert (cause.kind, cause.stage, cause.microbatches) == ("doubled", None, (0,)), str(verdict)
