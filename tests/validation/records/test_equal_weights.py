"""Weights that are one under two names, though nobody said so: as far as numbers tell, they are taken for one."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from pipeproof.judging.verdict import Verdict
from tests.support.pipeline_here import Job, checked, layers


@dataclass
class Tied(Job):
    """The first and the last stage have copies of one weight, whose gradients are ``added`` up, ``times`` so much."""

    added: bool = True
    times: float = 1.0

    def step(self) -> list[float]:
        losses = super().step()
        ends = self._ends
        whole = torch.stack([one.grad for one in ends if one.grad is not None]).sum(0) * self.times
        for one in ends if self.added else ():
            one.grad = whole.clone()
        return losses

    def norm(self) -> float:
        whole = super().norm()
        again = self._ends[1].grad if self.added else None  # of one weight, one copy counts
        return whole if again is None else math.sqrt(whole**2 - float(again.double().square().sum()))

    @property
    def _ends(self) -> list[nn.Parameter]:
        return [dict(self.stages[k].named_parameters())["layer.weight"] for k in (0, -1)]


def verdict_of(*, copied: bool = True, **more: float) -> Verdict:
    stages = layers(torch.tanh, torch.sin, torch.tanh)
    if copied:
        with torch.no_grad():
            stages[2].layer.weight.copy_(stages[0].layer.weight)  # type: ignore[union-attr,operator]
    return checked(Tied(stages, **more))  # type: ignore[arg-type]


def test_copies_that_have_one_sum_are_taken_for_one_weight() -> None:
    verdict = verdict_of()
    assert verdict.verdict == "pass", str(verdict)
    assert "taken for one weight" in verdict.law("gradient").note
    assert "2.layer.weight and 0.layer.weight" in verdict.law("gradient").note


def test_a_sum_of_them_may_be_wrong() -> None:
    assert verdict_of(times=2.0).verdict == "fail"


def test_copies_that_are_not_added_up_are_pointed_at() -> None:
    """They may be two weights that began alike."""
    verdict = verdict_of(added=False)
    assert verdict.verdict == "pass", str(verdict)
    assert "begin alike, and each has its own gradient: 0.layer.weight and 2.layer.weight" in str(verdict)
    assert "pass build=" in verdict.law("gradient").note


def test_other_weights_have_no_sum_in_common() -> None:
    verdict = verdict_of(copied=False)
    assert verdict.verdict == "fail", str(verdict)
    assert "alike" not in str(verdict)


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x + y)
        return out


@pytest.mark.parametrize("route", [{2: [(0, 0)], 3: [(1, 0), (2, 0)]}])
def test_twins_that_compute_the_same_are_two_weights(route: dict[int, list[tuple[int, int]]]) -> None:
    verdict = checked(Job([*layers(torch.tanh), Twins(), Twins(), Sum()], route=route))
    assert "taken for one" not in str(verdict)
    assert verdict.law("gradient").outcome == "pass", str(verdict)
