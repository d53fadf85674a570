"""A stage whose backward draws random numbers: where modules run again in it that is a fault, else nobody knows."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.golden import golden
from tests.support.pipeline_here import Job, checked, layers


class Recomputed(nn.Module):
    def __init__(self, *, keeps: bool, reentrant: bool = False) -> None:
        super().__init__()
        self.layer, self.drop, self.then = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)
        self.keeps, self.reentrant = keeps, reentrant

    def _body(self, x: Tensor) -> Tensor:
        found: Tensor = self.then(torch.tanh(self.drop(self.layer(x))))
        return found

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


@pytest.mark.parametrize(("at", "reentrant"), [(0, False), (1, False), (1, True)])
def test_a_checkpoint_that_draws_others_than_its_forward_is_named(at: int, reentrant: bool) -> None:
    verdict = checked(Job(stages_with(Recomputed(keeps=False, reentrant=reentrant), at), cast=drawing))
    assert [(cause.kind, cause.stage) for cause in verdict.cause] == [("randomness", at)], str(verdict)
    assert "preserve_rng_state" in verdict.cause[0].detail


@pytest.mark.parametrize("at", [0, 1, 2])
def test_also_where_all_comes_again_as_nobody_drew_meanwhile_it_is_not_right(at: int) -> None:
    verdict = checked(Job(stages_with(Recomputed(keeps=False), at)))
    assert verdict.verdict == "unknown", str(verdict)
    golden(verdict.law("boundaries").note)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_draws_the_same_is_right(reentrant: bool) -> None:
    verdict = checked(Job(stages_with(Recomputed(keeps=True, reentrant=reentrant), 1), cast=drawing))
    assert verdict.verdict == "pass", str(verdict)


class Seeded(Recomputed):
    """Seeds before it draws, in each run, and puts nothing back."""

    def _body(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return super()._body(x)


def test_a_checkpoint_that_seeds_before_it_draws_is_right() -> None:
    verdict = checked(Job(stages_with(Seeded(keeps=False), 1), cast=drawing))
    assert verdict.verdict == "pass", str(verdict)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_a_backward_gives_that_draws_by_itself_is_not_known(at: int) -> None:
    verdict = checked(Job(stages_with(Noisy(), at)))
    assert verdict.verdict == "unknown", str(verdict)
    golden(verdict.law("boundaries").note)
