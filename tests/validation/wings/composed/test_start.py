"""What ranks are told of a step that is held against itself must be alike: else the verdict names what is not."""

import math
from collections.abc import Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from pipeproof import Composed, Contract, check_step
from pipeproof.core.verdict import Verdict
from pipeproof.reference.accumulation import Accumulation
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.chained import LOSS, Faults, Step, backwards, data, forwards, named, stage_of
from tests.support.golden import golden
from tests.support.sweeps import each_once

COUNT, BOUND_S = 3, 3.0
Options = Mapping[str, Any]


def one_step(
    context: RankContext, stage: nn.Module, by: Composed, gradients: Mapping[str, Tensor] | None = None
) -> Verdict | None:
    """The verdict on a step, if it is checked."""
    at, microbatches = Step(context.rank, context.ranks), data(COUNT)
    with check_step(stage, microbatches, against=by, rename=named, timeout_s=BOUND_S) as check:
        forwards(at, stage, microbatches, Faults())
        backwards(at, COUNT, Faults())
        check.gradients(gradients)
    return check.verdict if check.due else None


def told(context: RankContext, options: list[Options], optimizers: list[bool]) -> str:
    stage = stage_of(context.rank)
    given = torch.optim.SGD(stage.parameters(), lr=0.1) if optimizers[context.rank] else None
    return one_step(context, stage, Composed(LOSS, optimizer=given, **options[context.rank])).details


LATE = Contract(accumulation=Accumulation(late=True))
UNLIKE: dict[str, list[Options]] = {
    "stages": [{}, {"stages": "one by one"}],
    "every": [{}, {"every": 2}],
    "build": [{"build": lambda: nn.Linear(1, 1)}, {}],
    "scaler": [{}, {"scaler": GradScaler("cpu")}],
    "accumulation": [{}, {"contract": LATE}],
}


@pytest.mark.parametrize(*each_once(case=UNLIKE, clips=[False, True]))
def test_both_values_are_named(case: str, clips: bool, simulated: World) -> None:
    options = UNLIKE[case]
    both = options
    if clips:
        by = [replace(one.get("contract", Contract()), max_norm=1.0) for one in options]
        both = [{**one, "contract": contract} for one, contract in zip(options, by, strict=True)]
    said = simulated.run(told, both, [False, False], ranks=2)
    golden(said[0].splitlines()[0])
    assert said[0] == said[1]


def test_all_that_train_have_an_optimizer_or_none(simulated: World) -> None:
    said, _ = simulated.run(told, [{}, {}], [True, False], ranks=2)
    golden(said.splitlines()[0])


def test_who_trains_nothing_needs_no_optimizer(simulated: World) -> None:
    said, _ = simulated.run(frozen, ranks=2)
    assert said.startswith("PASS"), said


def frozen(context: RankContext) -> str:
    stage = stage_of(context.rank)
    optimizer = None
    if context.rank:
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    else:
        stage.requires_grad_(False)
    at, microbatches = Step(context.rank, context.ranks), data(COUNT)
    by = Composed(LOSS, optimizer=optimizer)
    with check_step(stage, microbatches, against=by, rename=named, timeout_s=BOUND_S) as check:
        forwards(at, stage, microbatches, Faults())
        if context.rank:
            backwards(at, COUNT, Faults())
        else:
            flows(context)
        check.gradients()
        if optimizer is not None:
            optimizer.step()
    return check.verdict.details


def flows(context: RankContext) -> None:
    """What comes back to a stage that trains nothing."""
    for _ in range(COUNT):
        torch.distributed.recv(torch.empty(4, 8), context.rank + 1)


def misnamed(context: RankContext, clips: bool, given: Mapping[str, Any]) -> tuple[str, float]:
    by, began = Composed(LOSS, contract=Contract(max_norm=1.0 if clips else math.inf)), monotonic()
    found = one_step(context, stage_of(context.rank), by, given if context.rank else None)
    return found.details, monotonic() - began


@pytest.mark.parametrize("clips", [False, True])
def test_gradients_of_unknown_names_are_said_at_once(clips: bool, world: World) -> None:
    (said, took_s), (other, _) = world.run(misnamed, clips, {"nonsense": torch.zeros(3)}, ranks=2)
    golden(said.splitlines()[0])
    assert said == other
    assert took_s < BOUND_S


def test_what_is_no_contract_is_said_in_a_sentence() -> None:
    with check_step(nn.Linear(8, 8), data(COUNT), against=Composed(LOSS, contract=3)) as check:  # type: ignore[arg-type]
        check.gradients()
    golden(check.verdict.details.splitlines()[0])


@pytest.mark.parametrize("stage", [nn.LazyLinear(8), nn.Linear(8, 8, device="meta")])
def test_weights_that_are_made_in_the_first_call_are_said_in_a_sentence(stage: nn.Module) -> None:
    with check_step(stage, data(COUNT), against=Composed(LOSS)) as check:
        check.gradients()
    golden(check.verdict.details.splitlines()[0])
