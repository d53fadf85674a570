"""A stage with a loss of its own: what that adds to gradients is not known, and no fault."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipeproof.core.observe.own_losses import OwnLoss, OwnLosses
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.records.step_check import check_step
from pipeproof.wings.composed import StageByStage
from pipeproof.wings.composed.chain import place_of
from pipeproof.wings.simulated import SimulatedWorld
from pipeproof.worlds.worker import RankContext
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, MSE, Job, Layer, checked

Back = Callable[[nn.Module, Tensor, Tensor, Tensor], Any]  # a stage, what it was given and gave, and what flows back
PART = 1 / len(DATA)


class Balanced(Layer):
    """Keeps an auxiliary loss, of something that it gives no part of."""

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        self.hidden = self.layer(x)
        gates, left = self.hidden.chunk(2, 1)
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


def in_torchs_engine(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    """As a runtime does that has freed what it sent."""
    engine: Any = torch.autograd.Variable
    run, ends = engine._execution_engine.run_backward, ((gave, stage.balance), (flow, torch.ones(())))
    run(*ends, keep_graph=False, create_graph=False, inputs=(), allow_unreachable=True, accumulate_grad=True)


def weights_punished(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow)
    (0.01 * sum(one.square().sum() for one in stage.parameters())).backward()


def balance_by_hand(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    wanting = [given, *stage.parameters()]
    for one, found in zip(wanting, torch.autograd.grad([gave, stage.balance], wanting, [flow, None]), strict=True):
        one.grad = found if one.grad is None else one.grad + found


def input_punished(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    torch.autograd.backward([gave, given.square().mean()], [flow, None])


def input_punished_after(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow)
    given.square().mean().backward()


def step_by_step(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    """Gradients of what is between first, and what they give to weights last of all."""
    (between,) = torch.autograd.grad(gave, stage.hidden, flow, retain_graph=True)
    (given.grad,) = torch.autograd.grad(stage.hidden, given, between, retain_graph=True)
    torch.autograd.backward(stage.hidden, between, inputs=list(stage.parameters()))


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
    with check_step(dict(enumerate(stages)), data, against=StageByStage(MSE), rename="{}.{}".format) as check:
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


@pytest.mark.parametrize("back", [usual, multiplied, weights_later, by_hand, step_by_step])
def test_a_backward_by_what_a_stage_gave_is_judged(back: Back) -> None:
    verdict = verdict_of(back)
    assert verdict.outcome == "pass", str(verdict)


@pytest.mark.parametrize(
    "back",
    [
        together,
        summed,
        after,
        before,
        in_torchs_engine,
        weights_punished,
        balance_by_hand,
        input_punished,
        input_punished_after,
    ],
    ids=lambda one: one.__name__,
)
def test_what_a_loss_of_its_own_adds_is_not_known(back: Back) -> None:
    verdict = verdict_of(back)
    assert verdict.outcome == "unknown", str(verdict)
    assert not verdict.causes
    assert Reason.OWN_BACKWARD in verdict.law("boundaries").reasons
    golden(verdict.law("boundaries").note)
    assert "0.layer" not in verdict.details, "the other stages are judged all the same"


def test_a_fault_of_another_stage_is_told_all_the_same() -> None:
    verdict = verdict_of(after, times=2.0)
    assert verdict.outcome == "fail", str(verdict)
    assert {one.parameter for one in verdict.mismatches} == {"0.layer.weight"}


def of_all_weights(stages: Sequence[nn.Module]) -> Any:
    return 0.01 * sum(one.square().sum() for stage in stages for one in stage.parameters())


def test_a_loss_that_punishes_weights_is_one_of_each_stage() -> None:
    verdict = verdict_of(usual, last=of_all_weights)
    assert verdict.outcome == "unknown", str(verdict)
    assert Reason.OWN_BACKWARD in verdict.law("boundaries").reasons
    golden(verdict.law("boundaries").note)


class Heading(Balanced):
    """Has a head with which the loss computes, as one that never makes all logits at once."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)


def of_two(stages: Sequence[Any], loss_fn: Any, back: Callable[[Tensor, Tensor, Tensor], Any]) -> Verdict:
    """Of a step of two stages: ``back`` goes back through the last, with what it was given and gave, and the target."""
    with check_step(dict(enumerate(stages)), DATA, against=StageByStage(loss_fn), rename="{}.{}".format) as check:
        for x, target in DATA:
            gave = stages[0](x)
            given = gave.detach().requires_grad_()
            back(given, stages[1](given), target)
            gave.backward(given.grad)
        check.gradients()
    return check.verdict


@pytest.mark.parametrize("balanced", [False, True])
def test_a_loss_of_the_head_explains_no_loss_that_comes_to_other_weights(balanced: bool) -> None:
    torch.manual_seed(0)
    last = Heading()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return MSE(last.head(output), target)

    def back(given: Tensor, output: Tensor, target: Tensor) -> None:
        (loss_fn(output, target) * PART + (last.balance if balanced else 0.0)).backward()

    verdict = of_two([Layer(), last], loss_fn, back)
    assert verdict.outcome == ("unknown" if balanced else "pass"), str(verdict)


@pytest.mark.parametrize(("creates", "found"), [(False, "pass"), (True, "unknown")])
def test_a_gradient_that_is_asked_for_first_is_no_backward_of_the_stage(creates: bool, found: str) -> None:
    """As for a map of what matters, or for a loss that punishes it: it is added to no weight's."""
    torch.manual_seed(0)

    def back(given: Tensor, output: Tensor, target: Tensor) -> None:
        loss = MSE(output, target) * PART
        of = output.sum() if creates else loss
        (flow,) = torch.autograd.grad(of, given, retain_graph=True, create_graph=creates)
        (loss + flow.square().mean() if creates else loss).backward()

    verdict = of_two([Layer(), Layer()], MSE, back)
    assert verdict.outcome == found, str(verdict)


def both(output: Tensor, target: Tensor) -> Tensor:
    return MSE(output, target) + output.abs().mean()


def test_gradients_of_what_it_gave_that_are_weighed_first_do_not_flow() -> None:
    """As where a step has several tasks, and looks at the gradient of each."""
    torch.manual_seed(0)

    def back(given: Tensor, output: Tensor, target: Tensor) -> None:
        losses = MSE(output, target) * PART, output.abs().mean() * PART
        first, second = (torch.autograd.grad(one, output)[0] for one in losses)
        output.backward(first + second)

    verdict = of_two([Layer(), Layer()], both, back)
    assert verdict.outcome == "pass", str(verdict)


def slope(layer: nn.Module, x: Tensor) -> Tensor:
    made, back = torch.func.vjp(layer, x)
    return made + back(torch.ones_like(made))[0]


@pytest.mark.parametrize("inside", [slope, lambda layer, x: layer(x) * measured(layer, x)])
def test_a_stage_that_asks_for_gradients_is_judged(inside: Any) -> None:
    stages = [Layer(), Slope(inside), Layer()]
    verdict = checked(Job(stages))
    assert verdict.outcome == "pass", str(verdict)


def measured(layer: nn.Module, x: Tensor) -> float:
    """Something of gradients, where nobody may write to tensors."""
    weight = next(layer.parameters())
    loss = layer(x.detach()).sum()
    with torch.inference_mode():
        return float(torch.autograd.grad(loss, weight)[0].mean())


def adding(layer: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = layer(x)
    if torch.is_grad_enabled():
        made.square().mean().backward(retain_graph=True)
    return made


def test_a_stage_that_adds_gradients_in_its_forward_is_not_known() -> None:
    verdict = checked(Job([Layer(), Slope(adding), Layer()]))
    assert verdict.outcome == "unknown", str(verdict)


class Slope(Layer):
    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        return self.inside(self.layer, x)


def in_shards(context: RankContext) -> Verdict:
    mesh = init_device_mesh("cpu", (context.ranks,))
    return verdict_of(together, at=0, wrap=lambda stage: fully_shard(stage, mesh=mesh), shift=context.rank)


def test_it_is_known_of_a_stage_in_shards_which_computes_with_other_weights() -> None:
    verdict = SimulatedWorld().run(in_shards, ranks=2)[0]
    assert verdict.outcome == "unknown", str(verdict)
    assert Reason.OWN_BACKWARD in verdict.law("boundaries").reasons
    golden(verdict.law("boundaries").note)


def test_backwards_by_several_outputs_are_one() -> None:
    stages = [Layer(), Giving(), Layer()]
    with check_step(dict(enumerate(stages)), DATA, against=StageByStage(MSE), rename="{}.{}".format) as check:
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
    assert check.verdict.outcome == "unknown", "nobody told of that loss, and all the rest is right"
    assert Reason.WIRING in check.verdict.law("boundaries").reasons
    assert check.verdict.law("boundaries").left_out == (place_of((1, 1)),)


def test_an_error_before_owners_are_known_concerns_all() -> None:
    layer, every = nn.Linear(2, 2), [OwnLosses(lambda module: 0) for _ in range(3)]
    for one in every:
        one.watch(layer)
    with mock.patch("pipeproof.core.observe.own_losses._edges", side_effect=RuntimeError("planted")):
        layer(torch.ones(1, 2)).sum().backward()
    for one in every:
        one.close()
    assert ["planted" in one.fence.broken for one in every] == [True] * 3


ENGINE: Any = torch.autograd.Variable


class Counting:
    """Somebody else in the engine's place."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.ran = inner, 0

    def run_backward(self, *given: Any, **named: Any) -> Any:
        self.ran += 1
        return self.inner.run_backward(*given, **named)


def test_whoever_takes_the_engines_place_meanwhile_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINE, "_execution_engine", ENGINE._execution_engine)
    stages = [Layer(), Layer()]
    with check_step(dict(enumerate(stages)), DATA, against=StageByStage(MSE), rename="{}.{}".format):
        other = Counting(ENGINE._execution_engine)
        ENGINE._execution_engine = other
    assert ENGINE._execution_engine is other, "it is not ours to take away"
    assert verdict_of(after).outcome == "unknown"
    assert other.ran == len(DATA) * (4 + 4), "of each of three stages and one loss, and of each again"
    assert ENGINE._execution_engine is other


def test_torchs_engine_is_back_after_a_check_however_that_ends() -> None:
    before = ENGINE._execution_engine
    with pytest.raises(KeyError), check_step(Layer(), DATA, against=StageByStage(MSE)):  # noqa: PT012
        assert type(ENGINE._execution_engine).__module__ == OwnLoss.__module__
        raise KeyError
    assert ENGINE._execution_engine is before


def checked_there(context: RankContext) -> str:
    return verdict_of(after).outcome


def test_simulated_ranks_inside_a_check_have_none_that_is_open() -> None:
    stages = [Layer(), Layer()]
    with check_step(dict(enumerate(stages)), DATA, against=StageByStage(MSE), rename="{}.{}".format):
        found = SimulatedWorld().run(checked_there, ranks=1)
    assert found == ["unknown"]
