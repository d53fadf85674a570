"""The loss is a link: its targets tell which microbatch a call was meant for, and so which messages crossed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import Composed, check_step
from pipeproof.cases.case import Case
from pipeproof.core.verdict import Verdict
from pipeproof.wings.composed import validate_composed
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, MSE, Job, layers
from tests.support.sweeps import some


def of_links(specimen: str, stages: int, simulated: World, schedule: str = "gpipe") -> Verdict:
    split = ",".join("1" for _ in range(stages))
    case = f"{schedule} r{stages} s{stages} m4 split={split} model=mlp plan=train seed=0 specimen={specimen}"
    return validate_composed(Case.parse(case), simulated)


@pytest.mark.parametrize("stages", some([2, 3, 4], left=[3]))
def test_activations_that_crossed_are_wrong_where_they_came_and_nowhere_else(stages: int, simulated: World) -> None:
    verdict = of_links("activations-crossed", stages, simulated)
    assert [(law.name, law.wrong) for law in verdict.laws if law.outcome == "fail"] == [("boundaries", 2)]
    assert [(one.stage, one.microbatch) for one in verdict.mismatches] == [(1, 0), (1, 1)]
    (cause,) = verdict.cause
    assert (cause.rank, cause.stage, cause.microbatches) == (1, 1, (0, 1))
    assert "wrong-message" in {other.kind for (other, *_) in verdict.alternatives}
    follows = next(line for line in verdict.details.splitlines() if "loss, presence, gradient" in line)
    golden(follows)


@pytest.mark.parametrize("stages", some([2, 3], left=[2]))
def test_gradients_that_crossed_are_wrong_where_they_came(stages: int, simulated: World) -> None:
    verdict = of_links("gradients-crossed", stages, simulated)
    assert {(one.stage, one.rank) for one in verdict.mismatches} == {(0, 0)}


@pytest.mark.parametrize("stages", some([2, 3], left=[2]))
def test_targets_that_are_others_are_not_messages_that_crossed(stages: int, simulated: World) -> None:
    verdict = of_links("microbatches-swapped", stages, simulated)
    assert [(cause.kind, cause.stage) for cause in verdict.cause] == [("swapped-data", stages - 1)]


@pytest.mark.parametrize("stages", some([2, 3], left=[2]))
def test_what_one_stage_takes_for_another_in_its_backward_alone_is_told_there(stages: int, simulated: World) -> None:
    """What flows back goes astray, and the targets do not agree with it."""
    verdict = of_links("backward-of-another", stages, simulated)
    assert "mispaired" in {cause.kind for cause in verdict.cause}, str(verdict)
    assert {one.stage for one in verdict.mismatches if one.law == "boundaries"} == {0}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("times", [1.0, 128.0, 3.0])
def test_a_loss_is_cast_as_what_came_back_tells_whatever_it_is_multiplied_by(inside: bool, times: float) -> None:
    def cast(of_loss: bool) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=inside or not of_loss)

    stages = layers(torch.tanh, torch.tanh)
    data = [(x, torch.rand(4, 8)) for x, _ in DATA]
    job = Job(stages, data, cast=cast, times=times)
    with check_step(dict(enumerate(stages)), data, against=Composed(MSE), rename="{}.{}".format) as check:
        losses = job.step()
        for one in (one for stage in stages for one in stage.parameters()):
            one.grad = None if one.grad is None else one.grad / times
        check.gradients()
        check.report(losses=losses)
    verdict = check.verdict
    assert verdict.verdict == ("pass" if times == 1.0 else "unknown"), str(verdict)
    assert (verdict.law("loss").outcome, verdict.law("gradient").outcome) == ("pass", "pass"), str(verdict)


class WithHead(nn.Module):
    """A last stage whose head only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


@pytest.mark.parametrize("times", [1.0, 128.0])
@pytest.mark.parametrize("wrong", [False, True])
def test_weights_that_the_loss_alone_uses_are_compared(times: float, wrong: bool) -> None:
    last = WithHead()
    stages = [*layers(torch.tanh), last]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return MSE(last.head(output), target)

    with check_step(dict(enumerate(stages)), DATA, against=Composed(loss_fn), rename="{}.{}".format) as check:
        Job(stages, loss_fn=loss_fn, times=times).step()
        for one in (one for stage in stages for one in stage.parameters()):
            one.grad = None if one.grad is None else one.grad / times
        if wrong and last.head.weight.grad is not None:
            last.head.weight.grad *= 1.001
        check.gradients()
    law = check.verdict.law("gradient")
    assert (law.outcome, law.checked) == ("fail" if wrong else "pass", 6), str(check.verdict)


def test_a_loss_may_write_to_what_it_is_given() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return MSE(output.mul_(2.0), target)

    stages = layers(torch.sin, torch.sin)
    with check_step(dict(enumerate(stages)), DATA, against=Composed(loss_fn), rename="{}.{}".format) as check:
        Job(stages, loss_fn=loss_fn).step()
        check.gradients()
    assert check.verdict.verdict == "pass", str(check.verdict)


def of_some(output: Tensor, target: Tensor) -> Tensor:
    """A loss that takes no notice of the output where all of the target is zero."""
    return MSE(output, target) if bool(target.any()) else torch.zeros(())


class Skipping(Job):
    """No backward of ``lost`` runs, nor of a microbatch whose loss trains nothing."""

    lost: int | None = None

    def _train(self, m: int, x: Tensor, target: Any) -> float:
        if bool(target.any()) and m != self.lost:
            return super()._train(m, x, target)
        for stage in self.stages:
            x = stage(x.detach())
        return of_some(x, target).item()


@pytest.mark.parametrize("lost", [None, 2])
def test_a_microbatch_whose_loss_trains_nothing_owes_no_backward(lost: int | None) -> None:
    stages = layers(torch.tanh, torch.sin)
    job = Skipping(stages, loss_fn=of_some)  # the first target is zero
    job.lost = lost
    with check_step(dict(enumerate(stages)), DATA, against=Composed(of_some), rename="{}.{}".format) as check:
        losses = job.step()
        check.gradients()
        check.report(losses=losses)
    assert check.verdict.verdict == ("pass" if lost is None else "fail"), str(check.verdict)


def test_a_loss_that_trains_a_head_alone_owes_a_backward() -> None:
    last = WithHead()
    stages = [*layers(torch.tanh), last]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return MSE(last.head(output if bool(target.any()) else output.detach()), target)

    job = Skipping(stages, loss_fn=loss_fn)  # and drops the first one's backward
    with check_step(dict(enumerate(stages)), DATA, against=Composed(loss_fn), rename="{}.{}".format) as check:
        job.step()
        check.gradients()
    assert check.verdict.verdict == "fail", str(check.verdict)
