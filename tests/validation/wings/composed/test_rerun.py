"""A stage is rerun as it ran; where that cannot be, it is said why, and no other fault is hidden."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, MSE, Job, Layer, checked, layers


class Recomputed(nn.Module):
    def __init__(self, *, keeps: bool, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layer, self.drop, self.then = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)
        self.keeps, self.reentrant = keeps, reentrant

    def _body(self, x: Tensor) -> Tensor:
        return self.then(torch.tanh(self.drop(self.layer(x))))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self._body, x, use_reentrant=self.reentrant, preserve_rng_state=self.keeps)


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Tensor:
        return flows[0] + torch.randn_like(flows[0])


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return _Noise.apply(self.layer(x))  # type: ignore[no-untyped-call]  # in torch


def drawing(of_loss: bool) -> Any:
    """What else draws numbers in a step, as other forwards do that are run before a backward."""
    torch.rand(())
    return nullcontext()


def stages_with(one: nn.Module, at: int) -> list[nn.Module]:
    stages = layers(torch.tanh, torch.sin, torch.tanh)
    return [*stages[:at], one, *stages[at + 1 :]]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_draws_the_same_is_right(reentrant: bool) -> None:
    verdict = checked(Job(stages_with(Recomputed(keeps=True, reentrant=reentrant), 1), cast=drawing))
    assert verdict.outcome == "pass", str(verdict)


DRAWING = {
    "a function": Noisy,
    "a checkpoint that draws others than its forward": partial(Recomputed, keeps=False),
}


@pytest.mark.parametrize(
    ("at", "make"), [*product([0, 1, 2], DRAWING.values()), (1, partial(Recomputed, keeps=False, reentrant=True))]
)
def test_a_backward_that_draws_is_not_known(at: int, make: Callable[[], nn.Module]) -> None:
    verdict = checked(Job(stages_with(make(), at), cast=drawing))
    law = verdict.law("boundaries")
    assert (verdict.outcome, law.reasons) == ("unknown", (Reason.RERUN,)), str(verdict)
    assert f"stage {at} " in law.note


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
def test_a_target_told_before_is_not_seen(which: list[int]) -> None:
    verdict = told(which)
    assert verdict.outcome == "unknown", str(verdict)
    golden(verdict.details.splitlines()[0])


def test_a_target_alike_everywhere_came_nowhere() -> None:
    verdict = told([0, 0, 0])
    assert verdict.outcome == "unknown", str(verdict)
    golden(verdict.details.splitlines()[0])


class Changing(Layer):
    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        found = super().forward(x)
        if self.calls == 2:
            self.layer.weight.data.mul_(1.5)
        return found


def test_attributes_that_explain_nothing_hide_no_fault() -> None:
    verdict = checked(Job([Changing(), *layers(torch.tanh)]))
    assert verdict.outcome == "fail", str(verdict)


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def test_the_last_stages_graphs_go_with_the_check() -> None:
    """A hook at what a stage gave that keeps what the stage gave is a circle that Python does not see."""
    stages = layers(torch.tanh, torch.tanh)
    before = []
    for _ in range(3):
        assert checked(Job(stages)).outcome == "pass"
        nn.Sequential(*stages).zero_grad()
        before.append(tensors())
    assert before[1] == before[2]
