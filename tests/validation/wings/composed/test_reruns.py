"""Stages that run again change nothing of the job's, whatever their loss reaches."""

import torch
from torch import Tensor, nn

from pipeproof import Composed, Contract, check_step
from pipeproof.core.reason import Reason
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, MSE, Job, checked, layers


def test_a_loss_may_have_weights_of_its_own_and_look_at_a_stages() -> None:
    stages, own = layers(torch.tanh, torch.sin), nn.Parameter(torch.tensor(2.0))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return MSE(output * own, target) + sum(one.square().sum() for one in stages[1].parameters()) * 0.1

    with check_step(dict(enumerate(stages)), DATA, against=Composed(loss_fn), rename="{}.{}".format) as check:
        Job(stages, loss_fn=loss_fn).step()
        before = own.grad, own.grad.clone() if own.grad is not None else None
        check.gradients()
    assert own.grad is before[0]
    assert own.grad is not None
    assert torch.equal(own.grad, before[1])  # type: ignore[arg-type]  # it is there
    assert check.verdict.verdict == "unknown", str(check.verdict)
    told = "the loss trains weights that no stage holds: let the last stage's module hold them: one of shape []"
    assert told in check.verdict.law("gradient").note


def test_a_hook_on_a_gradient_is_not_called_again_and_what_it_makes_is_not_known() -> None:
    stages, calls = layers(torch.tanh, torch.sin), []
    stages[0].layer.weight.register_hook(lambda one: calls.append(one) or one)
    stages[1].layer.weight.register_hook(lambda one: one * 0.5)
    with check_step(dict(enumerate(stages)), DATA, against=Composed(MSE), rename="{}.{}".format) as check:
        Job(stages).step()
        before = len(calls)
        check.gradients()
    assert len(calls) == before
    law = check.verdict.law("gradient")
    assert (law.outcome, law.left_out) == ("unknown", ("1.layer.weight",)), str(check.verdict)
    assert Reason.HOOKS in law.reasons


def test_microbatches_with_the_same_inputs_in_another_order_are_refused_and_pass_in_theirs() -> None:
    data = [(torch.ones(4, 8), torch.full((4, 8), m / 4)) for m in range(3)]
    for given, outcome in ((data, "pass"), (data[::-1], "unknown")):
        stages = layers(torch.tanh, torch.sin)
        with check_step(dict(enumerate(stages)), given, against=Composed(MSE), rename="{}.{}".format) as check:
            Job(stages, data).step()
            check.gradients()
        assert check.verdict.verdict == outcome, str(check.verdict)
    golden(check.verdict.details.splitlines()[0])


def test_a_stage_that_no_gradient_comes_to_is_pointed_out() -> None:
    told = "stage 0 has parameters to be trained, and none of its calls gives one a gradient: is its graph cut inside?"
    verdict = checked(Job(layers(torch.Tensor.detach, torch.tanh)))
    assert (verdict.verdict, verdict.law("presence").note) == ("pass", told), str(verdict)
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


def test_a_microbatch_that_a_stage_ran_without_gradients_is_dropped_there() -> None:
    verdict = checked(Job([Unseen(), *layers(torch.tanh)]))
    (cause,) = verdict.cause
    assert (cause.kind, cause.rank, cause.stage, cause.microbatches) == ("dropped", 0, 0, (1,)), str(verdict)
    assert not any("dropped" in one.kinds for one in verdict.ruled_out), "sums of what ran say nothing of what did not"


def test_a_microbatch_that_all_stages_ran_again_is_doubled() -> None:
    verdict = checked(
        Job(layers(torch.tanh, torch.sin), [*DATA, DATA[0]]), given=DATA, contract=Contract(loss_divisor=4)
    )
    (cause,) = verdict.cause
    assert (cause.kind, cause.stage, cause.microbatches) == ("doubled", None, (0,)), str(verdict)
