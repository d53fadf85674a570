"""What ranks are told of a step that is held against itself must be alike: else the verdict names what is not."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from pipeproof import Contract, StageByStage, check_step
from pipeproof.reference.accumulation import Accumulation
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.chained import LOSS, Faults, Step, backwards, data, forwards, named, stage_of
from tests.support.golden import golden

COUNT, BOUND_S = 3, 3.0
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Ranks:
    """What each of two ranks is told beside the loss; the number of its stage, whether that is frozen and moved."""

    options: tuple[Options, Options] = ({}, {})
    max_norms: tuple[float, float] = (math.inf, math.inf)
    numbers: tuple[int, int] = (0, 1)
    optimizers: tuple[bool, bool] = (False, False)
    frozen: bool = False


def told(context: RankContext, ranks: Ranks) -> str:
    rank, stage = context.rank, stage_of(context.rank)
    stage.requires_grad_(not (ranks.frozen and rank == 0))
    options = dict(ranks.options[rank])
    contract = replace(options.pop("contract", Contract()), max_norm=ranks.max_norms[rank])
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1) if ranks.optimizers[rank] else None
    at, microbatches = Step(rank, context.ranks), data(COUNT)
    by = StageByStage(LOSS, optimizer=optimizer, contract=contract, **options)
    stages = {ranks.numbers[rank]: stage}
    with check_step(
        stages, microbatches, against=by, rename=lambda _, name: f"{rank}.{name}", timeout_s=BOUND_S
    ) as check:
        forwards(at, stage, microbatches, Faults())
        if ranks.frozen and rank == 0:
            flows(context)
        else:
            backwards(at, COUNT, Faults())
        check.gradients()
        if optimizer is not None:
            optimizer.step()
    return check.verdict.details


LATE, CLIPPED = Contract(accumulation=Accumulation(late=True)), (1.0, 1.0)
RANKS: dict[str, Ranks] = {
    "stages": Ranks(({}, {"stages": "one by one"})),
    "every": Ranks(({}, {"every": 2}), CLIPPED),
    "build": Ranks(({"build": lambda: nn.Linear(1, 1)}, {})),
    "scaler": Ranks(({}, {"scaler": GradScaler("cpu")}), CLIPPED),
    "accumulation": Ranks(({}, {"contract": LATE})),
    "max_norm": Ranks(max_norms=(1.0, 2.0)),
    "a stage that is nowhere": Ranks(numbers=(0, 2)),
    "a stage that is on both": Ranks(numbers=(0, 0)),
    "one optimizer": Ranks(optimizers=(True, False)),
    "one trains nothing": Ranks(optimizers=(False, True), frozen=True),
}


@pytest.mark.parametrize("name", RANKS)
def test_ranks_are_told_alike_and_make_a_chain(name: str, simulated: World) -> None:
    said, other = simulated.run(told, RANKS[name], ranks=2)
    golden(said.splitlines()[0])
    assert said == other


def flows(context: RankContext) -> None:
    """What comes back to a stage that trains nothing."""
    for _ in range(COUNT):
        torch.distributed.recv(torch.empty(4, 8), context.rank + 1)


def misnamed(context: RankContext, clips: bool, given: Mapping[str, Any]) -> tuple[str, float]:
    at, microbatches, stage = Step(context.rank, context.ranks), data(COUNT), stage_of(context.rank)
    by, began = StageByStage(LOSS, contract=Contract(max_norm=1.0 if clips else math.inf)), monotonic()
    with check_step(stage, microbatches, against=by, rename=named, timeout_s=BOUND_S) as check:
        forwards(at, stage, microbatches, Faults())
        backwards(at, COUNT, Faults())
        check.gradients(given if context.rank else None)
    return check.verdict.details, monotonic() - began


@pytest.mark.parametrize("clips", [False, True])
def test_gradients_of_unknown_names_are_said_at_once(clips: bool, world: World) -> None:
    (said, took_s), (other, _) = world.run(misnamed, clips, {"nonsense": torch.zeros(3)}, ranks=2)
    golden(said.splitlines()[0])
    assert said == other
    assert took_s < BOUND_S


@pytest.mark.parametrize(
    ("stage", "by"),
    [
        (nn.Linear(8, 8), StageByStage(LOSS, contract=3)),  # type: ignore[arg-type]
        (nn.LazyLinear(8), StageByStage(LOSS)),
        (nn.Linear(8, 8, device="meta"), StageByStage(LOSS)),
    ],
    ids=["no contract", "lazy", "meta"],
)
def test_what_no_step_begins_with_is_said(stage: nn.Module, by: StageByStage) -> None:
    with check_step(stage, data(COUNT), against=by) as check:
        check.gradients()
    golden(check.verdict.details.splitlines()[0])


def of_one_name(context: RankContext) -> str:
    torch.manual_seed(context.rank)
    module = nn.Linear(8, 8)
    with check_step({context.rank: module}, data(COUNT), against=StageByStage(LOSS), timeout_s=10.0) as check:
        for x, _ in data(COUNT):
            module(x).sum().backward()
        check.gradients()
    return check.verdict.details


def test_one_name_of_two_weights_is_told(simulated: World) -> None:
    (said, *_) = simulated.run(of_one_name, ranks=2)
    golden(said.splitlines()[0])
