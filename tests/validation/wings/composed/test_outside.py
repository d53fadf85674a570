"""A loss that a step makes of what an inner stage gave, outside of all stages: nobody knows what is due there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.records.step_check import check_step
from pipeproof.wings.composed.step import Composed
from tests.support.pipeline_here import DATA, MSE, Job, checked, layers

Back = Callable[[Tensor, Tensor], Any]  # what an inner stage gave, and what flows back to it


class Outside(Job):
    """The middle one of three stages has a backward of its own kind."""

    back: Back

    def _back(self, k: int, made: list[Tensor], sent: Any) -> None:
        (gave,), ((_, came),) = made, sent[k, 0]
        assert came.grad is not None
        (self.back if k == 1 else _usual)(gave, came.grad)


def _usual(gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow)


def small(gave: Tensor) -> Tensor:
    return gave.square().mean() / len(DATA)


def before(gave: Tensor, flow: Tensor) -> None:
    small(gave).backward(retain_graph=True)
    gave.backward(flow)


def after(gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow, retain_graph=True)
    small(gave).backward()


def together(gave: Tensor, flow: Tensor) -> None:
    torch.autograd.backward([gave, small(gave)], [flow, None])


def summed(gave: Tensor, flow: Tensor) -> None:
    ((gave * flow).sum() + small(gave)).backward()


def multiplied(gave: Tensor, flow: Tensor) -> None:
    (gave * flow).sum().backward()


def doubled(gave: Tensor, flow: Tensor) -> None:
    (gave * flow * 2).sum().backward()


def kept(gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow, retain_graph=True)


def altered(gave: Tensor, flow: Tensor) -> None:
    gave.backward(flow + small(gave).detach())


def verdict_of(back: Back, *, stages: list[nn.Module] | None = None) -> Verdict:
    job = Outside(stages or layers(torch.tanh, torch.sin, torch.tanh))
    job.back = back
    return checked(job)


@pytest.mark.parametrize("back", [before, after, together, summed])
def test_what_a_loss_outside_the_stages_adds_is_not_known(back: Back) -> None:
    verdict = verdict_of(back)
    assert verdict.verdict == "unknown", str(verdict)
    note = verdict.law("boundaries").note
    for told in ("comes to what stage 1 gave", "test_outside.py", "output gradient of 1B0"):
        assert told in note
    assert verdict.law("gradient").outcome == "pass"


@pytest.mark.parametrize("back", [multiplied, kept])
def test_a_backward_that_brings_what_was_sent_is_right(back: Back) -> None:
    verdict = verdict_of(back)
    assert verdict.verdict == "pass", str(verdict)


@pytest.mark.parametrize(("back", "kind"), [(doubled, "scale"), (altered, "altered")])
def test_a_fault_that_no_loss_explains_is_one(back: Back, kind: str) -> None:
    verdict = verdict_of(back)
    assert verdict.verdict == "fail", str(verdict)
    assert [cause.kind for cause in verdict.cause] == [kind]


def test_a_backward_that_runs_twice_beside_such_a_loss_is_a_fault() -> None:
    def both(gave: Tensor, flow: Tensor) -> None:
        gave.backward(flow, retain_graph=True)
        before(gave, flow)

    verdict = verdict_of(both)
    assert verdict.verdict == "fail", str(verdict)
    assert [cause.kind for cause in verdict.cause] == ["doubled"]


class Hooked(nn.Module):
    """Where a gradient comes to what it gives, it calls for the backward of a loss of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x))
        own = small(hidden)
        made = torch.sin(hidden)
        if made.requires_grad:
            made.register_hook(lambda flow: own.backward(retain_graph=True))
        return made


def test_a_backward_in_mid_backward_that_comes_to_what_a_stage_was_given_is_not_known() -> None:
    stages = layers(torch.tanh, torch.sin, torch.tanh)
    verdict = verdict_of(_usual, stages=[stages[0], Hooked(), stages[2]])
    assert verdict.verdict == "unknown", str(verdict)
    assert Reason.OWN_BACKWARD in verdict.law("boundaries").reasons, str(verdict)


class Both(nn.Module):
    """Gives a tensor, and another one that is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.layer(x)
        return made, torch.tanh(made)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.layer(x * y)


class EachOutput(Job):
    """A backward for each output of a stage."""

    def _back(self, k: int, made: list[Tensor], sent: Any) -> None:
        for n, one in enumerate(made):
            for _, came in sent[k, n]:
                assert came.grad is not None
                one.backward(came.grad, retain_graph=True)


def one_by_one(job: Job) -> list[Verdict]:
    """Of as many steps as there are stages, one of which alone is run again in each."""
    by, found = Composed(MSE, stages="one by one"), list[Verdict]()
    for _ in job.stages:
        with check_step(dict(enumerate(job.stages)), job.data, against=by, rename="{}.{}".format) as check:
            job.step()
            check.gradients()
        nn.ModuleList(job.stages).zero_grad()
        found.append(check.verdict)
    return found


@pytest.mark.parametrize("kind", [Job, EachOutput])
def test_what_flows_from_one_output_to_another_is_known_where_the_stage_runs_again(kind: type[Job]) -> None:
    verdict = checked(kind([*layers(torch.tanh), Both(), Product()]))
    assert verdict.verdict == "pass", str(verdict)
    first, own, _ = one_by_one(kind([*layers(torch.tanh), Both(), Product()]))
    assert own.verdict == "pass", str(own)
    assert first.verdict == "unknown", str(first)
    assert Reason.LINK in first.law("boundaries").reasons, str(first)


def test_a_loss_outside_of_a_stage_that_is_not_run_again_is_not_known_either() -> None:
    job = Outside(layers(torch.tanh, torch.sin, torch.tanh))
    job.back = before
    for verdict in one_by_one(job):
        assert verdict.verdict == "unknown", str(verdict)
