"""Weights that are one under two names, though nobody said so: as far as numbers tell, they are taken for one."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from pipeproof.judging.verdict import Verdict
from pipeproof.records.composed_step import Composed
from pipeproof.records.step_check import check_step
from tests.support.pipeline_here import MSE, Job, checked, layers


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


def test_copies_that_are_not_added_up_are_in_doubt() -> None:
    """They are equal, and what is beside them is not: neither a seed nor a copy of their modules makes that."""
    verdict = verdict_of(added=False)
    assert verdict.verdict == "unknown", str(verdict)
    assert "begin alike, and each has its own gradient: 0.layer.weight and 2.layer.weight" in str(verdict)
    assert "pass build=" in verdict.law("gradient").note


def seeded(*modules: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(one() for one in modules))


WIDE, BIASED = partial(nn.Linear, 8, 8, bias=False), partial(nn.Linear, 8, 8)


def states(module: nn.Linear) -> nn.Linear:
    """As state space models begin in each layer: with the same range in each row."""
    module.weight.data = torch.arange(1.0, 9.0).log().repeat(8, 1)
    return module


def waves(module: nn.Linear) -> nn.Linear:
    """As positions begin: with sines and cosines."""
    angles = torch.arange(8.0)[:, None] / torch.tensor([1.0, 10.0, 100.0, 1000.0])
    module.weight.data = torch.stack([angles.sin(), angles.cos()], -1).flatten(1) / 2
    return module


def identity(module: nn.Linear) -> nn.Linear:
    nn.init.eye_(module.weight)
    return module


EXPLAINED = {
    "the same": [seeded(WIDE, WIDE), seeded(WIDE, WIDE)],
    "until they draw others": [
        seeded(BIASED, partial(nn.Linear, 8, 5), partial(nn.Linear, 5, 8)),
        seeded(BIASED, nn.Tanh, partial(nn.Linear, 8, 6), partial(nn.Linear, 6, 8)),
    ],
    "one is all": [seeded(WIDE), seeded(WIDE)],
    "ranges": [nn.Sequential(BIASED(), states(BIASED())), nn.Sequential(states(BIASED()), nn.Tanh())],
    "identities": [nn.Sequential(identity(BIASED())), nn.Sequential(nn.Tanh(), identity(BIASED()))],
    "waves": [nn.Sequential(BIASED(), waves(BIASED())), nn.Sequential(waves(BIASED()), nn.Tanh())],
}


@pytest.mark.parametrize("stages", EXPLAINED.values(), ids=EXPLAINED)
def test_what_a_seed_or_no_draw_explains_is_only_pointed_at(stages: list[nn.Module]) -> None:
    verdict = checked(Job(stages))
    assert verdict.verdict == "pass", str(verdict)
    assert "begin alike, and each has its own gradient" in verdict.law("gradient").note


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(self.norm(x)))


@dataclass
class Repeated(Job):
    """Each stage has a copy of one block behind a layer of its own; of its weights ``alone`` is not summed."""

    alone: str = "none"

    def step(self) -> list[float]:
        losses = super().step()
        blocks = [stage[1] for stage in self.stages]  # type: ignore[index]  # they are sequences
        for copies in zip(*(block.named_parameters() for block in blocks), strict=True):
            whole = torch.stack([one.grad for _, one in copies]).sum(0)
            for name, one in copies:
                one.grad = one.grad if self.alone in (name, "all") else whole.clone()
        return losses


@pytest.mark.parametrize(("apart", "said"), [("all", "unknown"), ("norm.bias", "unknown"), ("none", "pass")])
def test_copies_of_a_whole_module_may_be_one_module(apart: str, said: str) -> None:
    block = Block()
    job = Repeated([nn.Sequential(BIASED(), deepcopy(block)) for _ in range(3)], alone=apart)
    with check_step(dict(enumerate(job.stages)), job.data, against=Composed(MSE), rename="{}.{}".format) as check:
        job.step()
        check.gradients()
    assert check.verdict.verdict == said, str(check.verdict)
    note = check.verdict.law("gradient").note
    assert ("2.1.norm.weight and 0.1.norm.weight" in note) == (apart != "all")
    assert ("each has its own gradient: 0.1.norm.bias and 1.1.norm.bias" in note) == (apart == "norm.bias")


def seeded_block() -> nn.Module:
    torch.manual_seed(0)
    return Block()


def test_gradients_of_two_weights_of_one_seed_may_have_been_added_up_by_mistake() -> None:
    """So nobody knows whether they are one weight."""
    job = Repeated([nn.Sequential(nn.Tanh(), seeded_block()) for _ in range(2)])
    with check_step(dict(enumerate(job.stages)), job.data, against=Composed(MSE), rename="{}.{}".format) as check:
        job.step()
        check.gradients()
    assert check.verdict.verdict == "unknown", str(check.verdict)
    note = check.verdict.law("gradient").note
    assert "as one seed makes them, and have one sum: 0.1.layer.bias and 1.1.layer.bias" in note


def test_norms_of_other_blocks_that_were_added_up_are_wrong() -> None:
    job = Repeated([nn.Sequential(BIASED(), Block()) for _ in range(2)], alone="layer.weight")
    verdict = checked(job)
    assert verdict.law("gradient").outcome == "fail", str(verdict)
    assert "one weight" not in str(verdict)


class Unembedding(nn.Module):
    """Has the weight of the first stage's embedding, as copies of it have that are another module's."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def test_another_module_with_the_weights_of_a_first_one_is_in_doubt() -> None:
    first = seeded(WIDE)
    verdict = checked(Job([first, Unembedding(first[0].weight)]))
    assert verdict.verdict == "unknown", str(verdict)


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


class Shared(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.own = nn.Parameter(weight.clone()), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.own(torch.tanh(x @ self.weight))
        return out


class SummedByEach(Job):
    """Every stage has a copy of one weight, and adds up the gradients in its own order."""

    def step(self) -> list[float]:
        losses = super().step()
        weights = [dict(stage.named_parameters())["weight"] for stage in self.stages]
        shares = [one.grad.clone() for one in weights if one.grad is not None]
        for k, one in enumerate(weights):
            one.grad = sum(shares[k:] + shares[:k], torch.zeros(8, 8))
        return losses

    def norm(self) -> float:
        others = [dict(stage.named_parameters())["weight"].grad for stage in self.stages[1:]]
        again = sum(float(one.double().square().sum()) for one in others if one is not None)
        return math.sqrt(super().norm() ** 2 - again)


def test_one_sum_of_three_copies_may_be_rounded_in_three_ways() -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    verdict = checked(SummedByEach([Shared(weight) for _ in range(3)]))
    assert verdict.verdict == "pass", str(verdict)
    assert "taken for one weight" in verdict.law("gradient").note


@pytest.mark.parametrize(("frozen", "said"), [([1], "unknown"), ([0, 1], "pass")])
def test_a_copy_that_alone_is_frozen_is_in_doubt(frozen: list[int], said: str) -> None:
    stages = [seeded(BIASED, WIDE), seeded(partial(nn.Linear, 8, 6), partial(nn.Linear, 6, 8), WIDE)]
    with torch.no_grad():
        stages[1][2].weight.copy_(stages[0][1].weight)  # type: ignore[union-attr,operator]
    for k in frozen:
        stages[k][-1].requires_grad_(False)
    verdict = checked(Job(stages))
    assert verdict.verdict == said, str(verdict)
    assert ("begin alike, and one of them is frozen: 0.1.weight and 1.2.weight" in str(verdict)) == (said == "unknown")


@pytest.mark.parametrize(("several", "said"), [(2, "pass"), (1, "unknown")])
def test_a_rule_that_begins_several_weights_of_one_stage_is_no_doubt(several: int, said: str) -> None:
    """As a matrix of a state space model, that is no range and no identity."""
    rule = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).tril()
    stages = [nn.Sequential(*(Shared(rule) for _ in range(several))), nn.Sequential(nn.Tanh(), Shared(rule))]
    verdict = checked(Job(stages))
    assert verdict.verdict == said, str(verdict)
