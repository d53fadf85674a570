"""Consumers of one output that send equal or opposite gradients: halves, several backwards, and one too many."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from pipeproof.judging.verdict import Verdict
from tests.support.pipeline_here import Job, Layer, checked, layers


class Next(Layer):
    """As many as its inputs, all of which get one gradient."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
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

    def forward(self, x: torch.Tensor, *others: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return super().forward(sum(others, x))


@pytest.mark.parametrize(("keep", "outcome"), [(1.0, "pass"), (0.5, "fail")])
def test_what_two_consumers_send_may_cancel(keep: float, outcome: str) -> None:
    stages = [*layers(torch.tanh, torch.neg), Summed()]
    stages[1].layer = nn.Identity()  # type: ignore[union-attr]
    verdict = checked(Job(stages, route={2: [(1, 0), (0, 0)]}, keep=keep))
    assert verdict.law("boundaries").outcome == outcome, str(verdict)
