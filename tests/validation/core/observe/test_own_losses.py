"""A stage with a loss of its own: what that adds to gradients is not known, and no fault."""

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
from tests.support.pipeline_here import DATA, MSE, Back, Job, Layer, checked

PART = 1 / len(DATA)
ENGINE: Any = torch.autograd.Variable


class Balanced(Layer):
    """Keeps an auxiliary loss, of something that it gives no part of."""

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        self.hidden = self.layer(x)
        gates, left = self.hidden.chunk(2, 1)
        self.balance = left.square().mean() * PART
        return torch.cat([gates, gates.tanh()], 1)


def weights_later(stage: nn.Module, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    (back,) = torch.autograd.grad(gave, given, flow, retain_graph=True)
    torch.autograd.backward(gave, flow, inputs=list(stage.parameters()))
    given.grad = back


def by_hand(stage: nn.Module, given: Tensor, gave: Any, flow: Any) -> None:
    wanting = [given, *stage.parameters()]
    for one, found in zip(wanting, torch.autograd.grad(gave, wanting, flow), strict=True):
        one.grad = found if one.grad is None else one.grad + found


def step_by_step(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    """Gradients of what is between first, and what they give to weights last of all."""
    (between,) = torch.autograd.grad(gave, stage.hidden, flow, retain_graph=True)
    (given.grad,) = torch.autograd.grad(stage.hidden, given, between, retain_graph=True)
    torch.autograd.backward(stage.hidden, between, inputs=list(stage.parameters()))


def after(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow, retain_graph=True)
    stage.balance.backward()


def before(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    stage.balance.backward(retain_graph=True)
    gave.backward(flow)


def in_torchs_engine(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
    """As a runtime does that has freed what it sent."""
    run, ends = ENGINE._execution_engine.run_backward, ((gave, stage.balance), (flow, torch.ones(())))
    run(*ends, keep_graph=False, create_graph=False, inputs=(), allow_unreachable=True, accumulate_grad=True)


def of_weights(*stages: nn.Module) -> Any:
    return 0.01 * sum(one.square().sum() for stage in stages for one in stage.parameters())


JUDGED: dict[str, Back] = {
    "usual": lambda stage, given, gave, flow: gave.backward(flow),
    "multiplied": lambda stage, given, gave, flow: (gave * flow).sum().backward(),
    "weights_later": weights_later,
    "by_hand": by_hand,
    "step_by_step": step_by_step,
}
OWN: dict[str, Back] = {
    "together": lambda stage, given, gave, flow: torch.autograd.backward([gave, stage.balance], [flow, None]),
    "summed": lambda stage, given, gave, flow: ((gave * flow).sum() + stage.balance).backward(),
    "after": after,
    "before": before,
    "in_torchs_engine": in_torchs_engine,
    "weights_punished": lambda stage, given, gave, flow: (gave.backward(flow), of_weights(stage).backward()),
    "balance_by_hand": lambda stage, given, gave, flow: by_hand(stage, given, [gave, stage.balance], [flow, None]),
    "input_punished": lambda _, given, gave, flow: torch.autograd.backward([gave, given.square().mean()], [flow, None]),
    "input_punished_after": lambda _, given, gave, flow: (gave.backward(flow), given.square().mean().backward()),
}


def three(at: int = 1) -> list[nn.Module]:
    """Stages, of which the one ``at`` has a loss of its own."""
    torch.manual_seed(0)
    return [Balanced() if k == at else Layer() for k in range(3)]


def is_not_known(verdict: Verdict) -> None:
    assert verdict.outcome == "unknown", str(verdict)
    assert not verdict.causes
    assert Reason.OWN_BACKWARD in verdict.law("boundaries").reasons
    golden(verdict.law("boundaries").note)


@pytest.mark.parametrize("back", JUDGED.values(), ids=JUDGED)
def test_a_backward_by_what_a_stage_gave_is_judged(back: Back) -> None:
    verdict = checked(Job(three(), by_stage={1: back}))
    assert verdict.outcome == "pass", str(verdict)


@pytest.mark.parametrize("back", OWN.values(), ids=OWN)
def test_what_a_loss_of_its_own_adds_is_not_known(back: Back) -> None:
    verdict = checked(Job(three(), by_stage={1: back}))
    is_not_known(verdict)
    assert "0.layer" not in verdict.details, "the other stages are judged all the same"


def test_a_fault_of_another_stage_is_told_all_the_same() -> None:
    stages = three()
    verdict = checked(Job(stages, by_stage={1: after}, change=lambda: stages[0].layer.weight.grad.mul_(2)))
    assert verdict.outcome == "fail", str(verdict)
    assert {one.parameter for one in verdict.mismatches} == {"0.layer.weight"}


def test_a_loss_that_punishes_weights_is_one_of_each_stage() -> None:
    stages = three()
    job = Job(stages, end=lambda _, gave, target: (MSE(gave, target) * PART + of_weights(*stages)).backward())
    is_not_known(checked(job))


@pytest.mark.parametrize(("balanced", "outcome"), [(False, "pass"), (True, "unknown")])
def test_a_loss_of_the_head_explains_no_loss_that_comes_to_other_weights(balanced: bool, outcome: str) -> None:
    """The loss computes with a head of the last stage, as one that never makes all logits at once."""
    torch.manual_seed(0)
    last = Balanced()
    last.head = nn.Linear(8, 8)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return MSE(last.head(output), target)

    def end(given: Tensor, output: Tensor, target: Tensor) -> None:
        (loss_fn(output, target) * PART + (last.balance if balanced else 0.0)).backward()

    verdict = checked(Job([Layer(), last], loss_fn=loss_fn, end=end))
    assert verdict.outcome == outcome, str(verdict)


def both(output: Tensor, target: Tensor) -> Tensor:
    return MSE(output, target) + output.abs().mean()


def looked_at(given: Tensor, output: Tensor, target: Tensor) -> None:
    """As for a map of what matters: it is added to no weight's."""
    loss = MSE(output, target) * PART
    torch.autograd.grad(loss, given, retain_graph=True)
    loss.backward()


def punished(given: Tensor, output: Tensor, target: Tensor) -> None:
    (flow,) = torch.autograd.grad(output.sum(), given, retain_graph=True, create_graph=True)
    (MSE(output, target) * PART + flow.square().mean()).backward()


def weighed(given: Tensor, output: Tensor, target: Tensor) -> None:
    """As where a step has several tasks, and looks at the gradient of each."""
    losses = MSE(output, target) * PART, output.abs().mean() * PART
    first, second = (torch.autograd.grad(one, output)[0] for one in losses)
    output.backward(first + second)


@pytest.mark.parametrize(
    ("end", "loss_fn", "found"), [(looked_at, MSE, "pass"), (punished, MSE, "unknown"), (weighed, both, "pass")]
)
def test_a_gradient_that_is_asked_for_first_is_no_backward_of_the_stage(end: Any, loss_fn: Any, found: str) -> None:
    torch.manual_seed(0)
    verdict = checked(Job([Layer(), Layer()], loss_fn=loss_fn, end=end))
    assert verdict.outcome == found, str(verdict)


class Inside(Layer):
    """Makes its output by a function of the layer and its input."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        return self.inside(self.layer, x)


def slope(layer: nn.Module, x: Tensor) -> Tensor:
    made, back = torch.func.vjp(layer, x)
    return made + back(torch.ones_like(made))[0]


def measured(layer: nn.Module, x: Tensor) -> Tensor:
    """Times something of gradients, where nobody may write to tensors."""
    loss = layer(x.detach()).sum()
    with torch.inference_mode():
        size = float(torch.autograd.grad(loss, next(layer.parameters()))[0].mean())
    return layer(x) * size


def adding(layer: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = layer(x)
    if torch.is_grad_enabled():
        made.square().mean().backward(retain_graph=True)
    return made


@pytest.mark.parametrize(("inside", "found"), [(slope, "pass"), (measured, "pass"), (adding, "unknown")])
def test_gradients_in_a_forward_are_known_unless_they_are_added(inside: Any, found: str) -> None:
    verdict = checked(Job([Layer(), Inside(inside), Layer()]))
    assert verdict.outcome == found, str(verdict)


def in_shards(context: RankContext) -> Verdict:
    stages = three(0)
    for stage in stages:
        fully_shard(stage, mesh=init_device_mesh("cpu", (context.ranks,)))
    data = [(x + context.rank, target) for x, target in DATA]
    return checked(Job(stages, data, by_stage={0: OWN["together"]}))


def test_it_is_known_of_a_stage_in_shards_which_computes_with_other_weights() -> None:
    is_not_known(SimulatedWorld().run(in_shards, ranks=2)[0])


def test_backwards_by_several_outputs_are_one() -> None:
    def back(stage: Any, given: Tensor, gave: Tensor, flow: Tensor) -> None:
        gave.backward(flow, retain_graph=True)
        stage.balance.backward()

    class Giving(Balanced):
        """Gives its auxiliary loss as well."""

        def __call__(self, *given: Any, **named: Any) -> Any:
            made, self.balance = super().__call__(*given, **named)
            return made

        def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
            made = self.layer(x)
            return made.tanh(), made.square().mean() * PART

    verdict = checked(Job([Layer(), Giving(), Layer()], by_stage={1: back}))
    assert verdict.outcome == "unknown", "nobody told of that loss, and all the rest is right"
    assert Reason.WIRING in verdict.law("boundaries").reasons
    assert verdict.law("boundaries").left_out == (place_of((1, 1)),)


def test_an_error_before_owners_are_known_concerns_all() -> None:
    layer, every = nn.Linear(2, 2), [OwnLosses(lambda module: 0) for _ in range(3)]
    for one in every:
        one.watch(layer)
    with mock.patch("pipeproof.core.observe.own_losses._edges", side_effect=RuntimeError("planted")):
        layer(torch.ones(1, 2)).sum().backward()
    for one in every:
        one.close()
    assert ["planted" in one.fence.broken for one in every] == [True] * 3


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
    assert checked(Job(three(), by_stage={1: after})).outcome == "unknown"
    assert other.ran == len(DATA) * (4 + 4), "of each of three stages and one loss, and of each again"
    assert ENGINE._execution_engine is other


def test_torchs_engine_is_back_after_a_check_however_that_ends() -> None:
    before = ENGINE._execution_engine
    with pytest.raises(KeyError), check_step(Layer(), DATA, against=StageByStage(MSE)):  # noqa: PT012
        assert type(ENGINE._execution_engine).__module__ == OwnLoss.__module__
        raise KeyError
    assert ENGINE._execution_engine is before


def checked_there(context: RankContext) -> str:
    return checked(Job(three(), by_stage={1: after})).outcome


def test_simulated_ranks_inside_a_check_have_none_that_is_open() -> None:
    stages = [Layer(), Layer()]
    with check_step(dict(enumerate(stages)), DATA, against=StageByStage(MSE), rename="{}.{}".format):
        found = SimulatedWorld().run(checked_there, ranks=1)
    assert found == ["unknown"]
