"""Consumers of one output that send equal or opposite gradients: halves, several backwards, and one too many."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.verdict import Verdict
from pipeproof.records.step_check import check_step
from pipeproof.wings.composed.step import Composed
from tests.support.pipeline_here import DATA, MSE, Job, Layer, Sent, checked, layers


class Next(Layer):
    """As many as its inputs, all of which get one gradient."""

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Tensor:
        return sum(others, x + 1)


def verdict_of(apart: Mapping[int, int]) -> Verdict:
    """Of a step in which the second stage's output goes to the third, and to the fourth, which adds both up."""
    return checked(Job([*layers(torch.tanh, torch.sin), Next(), Next()], route={3: [(2, 0), (1, 0)]}, apart=apart))


@pytest.mark.parametrize("apart", [{}, {1: 1}], ids=["together", "apart"])
def test_two_consumers_may_send_the_same(apart: Mapping[int, int]) -> None:
    verdict = verdict_of(apart)
    assert verdict.verdict == "pass", str(verdict)


def test_what_no_consumer_sent_is_a_backward_too_many() -> None:
    verdict = verdict_of({1: 2})
    assert [(one.kind, one.stage) for one in verdict.cause] == [("doubled", 1)], str(verdict)


class Summed(Layer):
    """Of all its inputs together."""

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Tensor:
        return super().forward(sum(others, x))


@pytest.mark.parametrize(("keep", "outcome"), [(1.0, "pass"), (0.5, "fail")])
def test_what_two_consumers_send_may_cancel(keep: float, outcome: str) -> None:
    stages = [*layers(torch.tanh, torch.neg), Summed()]
    stages[1].layer = nn.Identity()  # type: ignore[union-attr]
    verdict = checked(Job(stages, route={2: [(1, 0), (0, 0)]}, keep=keep))
    assert verdict.law("boundaries").outcome == outcome, str(verdict)


class Shared(Layer):
    """Both of its outputs are made of what it makes first."""

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> tuple[Tensor, Tensor]:
        whole: Tensor = super().forward(sum(others, x))
        return whole.sin(), whole.exp()


@dataclass
class OneByOne(Job):
    """Each output has a backward of its own, the first of each stage as often as ``times`` says."""

    often: int = 1

    def _back(self, k: int, made: list[Tensor], sent: Sent) -> None:
        for n, one in enumerate(made):
            for _ in range(self.often if n == 0 else 1):
                for _, came in sent[k, n]:
                    one.backward(came.grad, retain_graph=True)


@pytest.mark.parametrize("often", [1, 2])
def test_each_output_may_have_a_backward_of_its_own(often: int) -> None:
    torch.manual_seed(0)
    verdict = checked(OneByOne([Shared(), Shared(), Summed()], often=often))
    assert verdict.verdict == ("pass" if often == 1 else "fail"), str(verdict)
    assert {(one.kind, one.stage) for one in verdict.cause} <= {("doubled", 0), ("doubled", 1)}


@pytest.mark.parametrize(("times", "outcome"), [(1.0, "pass"), (2.0, "fail")])
def test_each_term_of_the_loss_may_have_a_backward_of_its_own(times: float, outcome: str) -> None:
    def both(output: Tensor, target: Tensor) -> Tensor:
        return MSE(output, target) + output.abs().mean()

    first, last = layers(torch.tanh, torch.sin)
    with check_step({0: first, 1: last}, DATA, against=Composed(both), rename="{}.{}".format) as check:
        for x, target in DATA:
            sent = first(x)
            came = sent.detach().requires_grad_()
            made = last(came)
            (MSE(made, target) / len(DATA)).backward(retain_graph=True)
            (times * made.abs().mean() / len(DATA)).backward()
            sent.backward(came.grad)
        check.gradients()
    assert check.verdict.verdict == outcome, str(check.verdict)
