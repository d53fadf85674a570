"""Steps that are checked now and then, one stage after the other; and the job goes on as if nobody had looked."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeproof import StageByStage, check_step
from pipeproof.core.verdict import Verdict
from pipeproof.records.checked_step import CheckError
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.chained import LOSS, Faults, Step, backwards, data, forwards, named, stage_of
from tests.support.sweeps import SWEEP

pytestmark = pytest.mark.long

COUNT, RANKS = 4, 3


def trained(
    context: RankContext, steps: int, faults: Sequence[int], options: dict[str, Any] | None
) -> tuple[list[tuple[int, Verdict]], list[float], list[Tensor]]:
    """So many steps; rank 1 doubles a gradient in some. No ``options``: nobody checks.

    Of each step that was checked its number and the verdict; all losses; and the weights.
    """
    rank, last, microbatches = context.rank, context.ranks - 1, data(COUNT)
    observed, losses = list[tuple[int, Verdict]](), list[float]()
    stage = stage_of(rank)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.Adam(stage.parameters(), lr=0.01)
    by = StageByStage(LOSS, **(options or {}))
    given = microbatches if rank in (0, last) else None
    for number in range(steps):
        optimizer.zero_grad()
        at = Step(rank, context.ranks)
        check = None if options is None else check_step(stage, given, against=by, rename=named, timeout_s=20)
        if check is not None:
            check.__enter__()
        forwards(at, stage, microbatches, Faults())
        backwards(at, COUNT, Faults())
        if rank == 1 and number in faults:
            next(stage.parameters()).grad *= 2  # type: ignore[operator]  # it has one
        if check is not None:
            check.gradients()
        optimizer.step()
        losses += at.losses
        if check is not None:
            check.report(losses=at.losses or None)
            check.__exit__(None, None, None)
            if check.active:
                observed.append((number, check.verdict))
    return observed, losses, [parameter.detach().clone() for parameter in stage.parameters()]


def test_one_step_of_so_many_is_checked_one_stage_after_the_other(simulated: World) -> None:
    (observed, *_), *_ = simulated.run(trained, 12, (), {"every": 3, "stages": "one by one"}, ranks=RANKS)
    assert [(step, one.outcome) for step, one in observed] == [(step, "pass") for step in (0, 3, 6, 9)]
    assert [one.config.split(" of ")[0] for _, one in observed] == ["stage 0", "stage 1", "stage 2", "stage 0"]


def test_a_fault_shows_when_it_is_its_stage_s_turn(simulated: World) -> None:
    (observed, *_), *_ = simulated.run(trained, 6, range(6), {"stages": "one by one"}, ranks=RANKS)
    assert [one.outcome for _, one in observed] == ["pass", "fail", "pass"] * 2
    failed = [[law.name for law in one.laws if law.outcome == "fail"] for _, one in observed]
    assert failed == [[], ["gradient"], []] * 2


def test_without_turns_every_stage_is_checked(simulated: World) -> None:
    (observed, *_), *_ = simulated.run(trained, 4, [2], {"every": 2}, ranks=RANKS)
    assert [(step, one.outcome) for step, one in observed] == [(0, "pass"), (2, "fail")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"every": 7, "stages": "one by one"}, 50),
        ({}, 8),
        ({"host": True}, 8),
        pytest.param({}, 50, marks=SWEEP),
        pytest.param({"host": True}, 50, marks=SWEEP),
    ],
)
def test_a_job_that_is_checked_goes_on_with_the_same_bits(
    options: dict[str, Any], steps: int, simulated: World
) -> None:
    plain = simulated.run(trained, steps, (), None, ranks=RANKS)
    checked = simulated.run(trained, steps, (), options, ranks=RANKS)
    for (_, losses, weights), (_, others, same) in zip(plain, checked, strict=True):
        assert losses == others
        assert all(map(torch.equal, weights, same))


WEIGHT = torch.nn.Parameter(torch.ones(2))
NO_COPY = "masters has what is no copy of a weight: expected copies of its shape, by weight"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scaler": 2.0}, "scaler is 2.0: expected a torch.amp.GradScaler, or one that has get_scale()"),
        ({"masters": [1]}, "masters is [1]: expected a mapping of weights to their copies, such as dict(zip(...))"),
        *(({"masters": one}, NO_COPY) for one in ({"weight": WEIGHT}, {WEIGHT: 1.0}, {WEIGHT: torch.ones(3)})),
        *(({"optimizer": one}, f"optimizer is {one}: expected this rank's torch.optim.Optimizer") for one in (3, [3])),
        ({"every": 0}, "every is 0: expected a number of steps, from 1"),
        ({"every": "often"}, "every is 'often': expected a number of steps, from 1"),
        ({"stages": "some"}, 'stages is \'some\': expected "all" or "one by one"'),
    ],
)
def test_what_is_no_turn_is_refused_in_a_sentence(options: dict[str, Any], told: str) -> None:
    with check_step({0: stage_of(0)}, data(1), against=StageByStage(LOSS, **options)) as check:
        pass
    assert told in check.verdict.details


def test_a_step_that_is_not_checked_has_no_verdict() -> None:
    by = StageByStage(LOSS, every=2)
    by.turn()
    with check_step({0: stage_of(0)}, data(1), against=by) as check:
        check.gradients()
        check.report(loss=1.0)
    assert not check.active
    with pytest.raises(CheckError, match=r"ask check\.active"):
        _ = check.verdict
