"""What a third run tells of rounding where modules compute in bf16 in another layout, and of what is none."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.verdict import Verdict
from pipeproof.wings.runs import compare_runs
from tests.support.golden import golden
from tests.support.long_runs import WIDTH, Fault, Loop

STEPS = 4


class Cut(nn.Linear):
    """Computes in bf16, and adds up in two parts, as ranks do that have so many columns."""

    at = 0

    def forward(self, x: Tensor) -> Tensor:
        x, weight = x.bfloat16(), self.weight.bfloat16()
        made = nn.functional.linear(x[:, : self.at], weight[:, : self.at]) if self.at else 0
        return (made + nn.functional.linear(x[:, self.at :], weight[:, self.at :], self.bias.bfloat16())).float()


def trained(to: Path, at: int, fault: Fault | None = None, begins: int = 1) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(Cut(WIDTH, WIDTH), nn.Tanh(), Cut(WIDTH, WIDTH), nn.Tanh(), Cut(WIDTH, WIDTH))
    for layer in model[::2]:
        layer.at = at
    Loop(fault=fault, begins=begins, model=model).train(to, range(STEPS))
    return to


def lost(loop: Loop, number: int) -> None:
    gradient = loop.model.get_parameter("0.bias").grad
    gradient.zero_()


def turned(loop: Loop, number: int) -> None:
    gradient = loop.model.get_parameter("0.bias").grad
    gradient.neg_()


def said(verdict: Verdict) -> tuple[object, ...]:
    first = verdict.mismatches[0]
    return verdict.outcome, first.step, first.law, first.parameter


@pytest.mark.parametrize("fault", [None, lost, turned])
def test_of_another_layout_in_bf16_a_third_one_tells_rounding_from_a_fault(fault: Fault | None, tmp_path: Path) -> None:
    good, observed, third = (
        trained(tmp_path / "good", 0),
        trained(tmp_path / "observed", 4, fault),
        trained(tmp_path / "3", 3),
    )
    verdict = compare_runs(good, observed, third=third)
    if fault is None:
        assert verdict.outcome == "pass", str(verdict)
    else:
        assert said(verdict) == ("fail", 1, "gradient", "0.bias"), str(verdict)


def test_what_is_wrong_is_said_before_what_may_be_rounding(tmp_path: Path) -> None:
    def nudged(loop: Loop, number: int) -> None:
        loop.model.get_parameter("0.bias").data.mul_(1 + 1e-6)

    good, observed, third = (
        trained(tmp_path / "good", 0),
        trained(tmp_path / "observed", 4, lost, 0),
        trained(tmp_path / "3", 0, nudged, 0),
    )
    verdict = compare_runs(good, observed, third=third)
    assert said(verdict) == ("fail", 0, "gradient", "0.bias"), str(verdict)
    assert verdict.law("loss").outcome == "unknown", str(verdict)
    golden(verdict.headline)
