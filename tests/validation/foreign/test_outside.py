"""A loss that a step makes of what an inner stage gave, outside of all stages: nobody knows what is due there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.judging.verdict import Verdict
from tests.support.pipeline_here import DATA, Job, checked, layers

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
    assert "comes to what was given to stage 1, and not by what the stage gave" in verdict.law("boundaries").note
