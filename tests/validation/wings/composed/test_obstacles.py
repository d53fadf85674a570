"""A stage whose calls depend on what its module had in attributes is not known, and hides no other fault."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeproof.core.verdict import Verdict
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, MSE, Job, Layer, checked, layers


class Losing(Layer):
    """Makes the loss, with a target that it is told before."""

    target: Tensor

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        return MSE(super().forward(x), self.target)


def told(which: list[int]) -> Verdict:
    torch.manual_seed(0)
    stages = [*layers(torch.tanh), Losing()]

    def tell(stage: int, microbatch: int, given: list[Tensor]) -> list[Tensor]:
        stages[1].target = DATA[which[microbatch]][1]
        return given

    return checked(Job(stages, loss_fn=None, fault=tell))


@pytest.mark.parametrize("which", [[0, 1, 2], [0, 0, 2]])
def test_a_target_that_is_told_before_a_call_is_not_seen(which: list[int]) -> None:
    verdict = told(which)
    assert verdict.verdict == "unknown", str(verdict)
    golden(str(verdict).splitlines()[0])


def test_a_target_that_is_the_same_in_all_calls_came_to_no_stage() -> None:
    verdict = told([0, 0, 0])
    assert verdict.verdict == "unknown", str(verdict)
    golden(str(verdict).splitlines()[0])


class Changing(Layer):
    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        found = super().forward(x)
        if self.calls == 2:
            self.layer.weight.data.mul_(1.5)
        return found


def test_attributes_that_explain_nothing_hide_no_fault() -> None:
    verdict = checked(Job([Changing(), *layers(torch.tanh)]))
    assert verdict.verdict == "fail", str(verdict)
