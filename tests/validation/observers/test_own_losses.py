"""A stage with a loss of its own: what that adds to gradients is not known, and no fault."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipeproof.judging.verdict import Verdict
from pipeproof.records.composed_step import Composed
from pipeproof.records.step_check import check_step
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.pipeline_here import DATA, MSE, Layer

Back = Callable[[nn.Module, Tensor, Tensor, Tensor], Any]  # a stage, what it was given and gave, and what flows back
PART = 1 / len(DATA)


class Balanced(Layer):
    """Keeps an auxiliary loss, of something that it gives no part of."""

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        gates, left = self.layer(x).chunk(2, 1)
        self.balance = left.square().mean() * PART
        return torch.cat([gates, gates.tanh()], 1)


class Giving(Layer):
    """Gives its auxiliary loss as well."""

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        made = self.layer(x)
        return made.tanh(), made.square().mean() * PART


def usual(stage: nn.Module, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow)


def multiplied(stage: nn.Module, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    (gave * flow).sum().backward()


def weights_later(stage: nn.Module, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    hidden = gave.grad_fn
    assert hidden is not None
    (back,) = torch.autograd.grad(gave, given, flow, retain_graph=True)
    torch.autograd.backward(gave, flow, inputs=list(stage.parameters()))
    given.grad = back


def by_hand(stage: nn.Module, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    wanting = [given, *stage.parameters()]
    for one, found in zip(wanting, torch.autograd.grad(gave, wanting, flow), strict=True):
        one.grad = found if one.grad is None else one.grad + found


def together(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    torch.autograd.backward([gave, stage.balance], [flow, None])


def summed(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    ((gave * flow).sum() + stage.balance).backward()


def after(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow, retain_graph=True)
    stage.balance.backward()


def before(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    stage.balance.backward(retain_graph=True)
    gave.backward(flow)


def weights_punished(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow)
    (0.01 * sum(one.square().sum() for one in stage.parameters())).backward()


def balance_by_hand(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    wanting = [given, *stage.parameters()]
    for one, found in zip(wanting, torch.autograd.grad([gave, stage.balance], wanting, [flow, None]), strict=True):
        one.grad = found if one.grad is None else one.grad + found


def input_punished(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    torch.autograd.backward([gave, given.square().mean()], [flow, None])


def no_more(stages: Sequence[nn.Module]) -> Any:
    return 0.0


def verdict_of(
    back: Back, *, at: int = 1, wrap: Any = None, last: Any = no_more, times: float = 1.0, shift: float = 0.0
) -> Verdict:
    """Of a step in which the stage ``at`` goes ``back`` so; what ``last`` makes of all of them, the loss has besides.

    ``wrap`` is called with each stage. ``times``: what a gradient of the first stage is multiplied by.
    ``shift`` makes the data another.
    """
    torch.manual_seed(0)
    data = [(x + shift, target) for x, target in DATA]
    stages = [Balanced() if k == at else Layer() for k in range(3)]
    for stage in stages if wrap else ():
        wrap(stage)
    with check_step(dict(enumerate(stages)), data, against=Composed(MSE), rename="{}.{}".format) as check:
        for x, target in data:
            given, gave = [x], [stages[0](x)]
            for stage in stages[1:]:
                given.append(gave[-1].detach().requires_grad_())
                gave.append(stage(given[-1]))
            (MSE(gave[-1], target) * PART + last(stages)).backward()
            for k in reversed(range(len(stages) - 1)):
                flow = given[k + 1].grad
                assert flow is not None
                (back if k == at else usual)(stages[k], given[k], gave[k], flow)
        if times != 1.0:
            stages[0].layer.weight.grad.mul_(times)
        check.gradients()
    return check.verdict


@pytest.mark.parametrize("back", [usual, multiplied, weights_later, by_hand])
def test_a_backward_by_what_a_stage_gave_is_judged(back: Back) -> None:
    verdict = verdict_of(back)
    assert verdict.verdict == "pass", str(verdict)


@pytest.mark.parametrize(
    "back",
    [together, summed, after, before, weights_punished, balance_by_hand, input_punished],
    ids=lambda one: one.__name__,
)
def test_what_a_loss_of_its_own_adds_is_not_known(back: Back) -> None:
    verdict = verdict_of(back)
    assert verdict.verdict == "unknown", str(verdict)
    assert not verdict.cause
    what = "what was given to" if back is input_punished else "the weights of"
    assert "a backward at tests/validation/observers/test_own_losses.py:" in str(verdict)
    assert f"{back.__name__} comes to {what} stage 1, and not by what the stage gave" in str(verdict)
    assert "0.layer" not in str(verdict), "the other stages are judged all the same"


def test_a_fault_of_another_stage_is_told_all_the_same() -> None:
    verdict = verdict_of(after, times=2.0)
    assert verdict.verdict == "fail", str(verdict)
    assert {one.parameter for one in verdict.mismatches} == {"0.layer.weight"}


def of_all_weights(stages: Sequence[nn.Module]) -> Any:
    return 0.01 * sum(one.square().sum() for stage in stages for one in stage.parameters())


def test_a_loss_that_punishes_weights_is_one_of_each_stage() -> None:
    verdict = verdict_of(usual, last=of_all_weights)
    assert verdict.verdict == "unknown", str(verdict)
    assert all(f"comes to the weights of stage {k}, and not by" in str(verdict) for k in range(3))


def in_shards(context: RankContext) -> Verdict:
    mesh = init_device_mesh("cpu", (context.ranks,))
    return verdict_of(together, at=0, wrap=lambda stage: fully_shard(stage, mesh=mesh), shift=context.rank)


def test_it_is_known_of_a_stage_in_shards_which_computes_with_other_weights() -> None:
    verdict = World(kind="simulated").run(in_shards, ranks=2)[0]
    assert verdict.verdict == "unknown", str(verdict)
    assert "together comes to the weights of stage 0, and not by" in str(verdict)


def test_backwards_by_several_outputs_are_one() -> None:
    stages = [Layer(), Giving(), Layer()]
    with check_step(dict(enumerate(stages)), DATA, against=Composed(MSE), rename="{}.{}".format) as check:
        for x, target in DATA:
            gave = stages[0](x)
            given = gave.detach().requires_grad_()
            made, balance = stages[1](given)
            last = made.detach().requires_grad_()
            (MSE(stages[2](last), target) * PART).backward()
            made.backward(last.grad, retain_graph=True)
            balance.backward()
            gave.backward(given.grad)
        check.gradients()
    assert check.verdict.verdict == "unknown", "nobody told of that loss, and all the rest is right"
    assert "nobody is known to have received it: output 1 of stage 1" in str(check.verdict)
