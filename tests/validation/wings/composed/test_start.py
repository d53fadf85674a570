"""What ranks are told of a step that is held against itself must be alike: else the verdict names what is not.

Lines of ranks are replicas of each other, or parts of one; peers, with the same stages, share what each has.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from pipeproof import Contract, StageByStage, check_step
from pipeproof.records.rank_part import Arrival, Run
from pipeproof.reference.accumulation import Accumulation
from pipeproof.wings.composed.link import StageCalls
from pipeproof.wings.composed.start import Agreed, ChainStart, Peers
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.chained import LOSS, Faults, Step, backwards, data, forwards, stage_of
from tests.support.golden import golden

COUNT, BOUND_S = 3, 3.0
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Ranks:
    """What each of two ranks is told beside the loss; the number of its stage, whether that is frozen and moved.

    ``given``: the gradients that rank 1 hands over, if not those that are there.
    """

    options: tuple[Options, Options] = ({}, {})
    max_norms: tuple[float, float] = (math.inf, math.inf)
    numbers: tuple[int, int] = (0, 1)
    optimizers: tuple[bool, bool] = (False, False)
    frozen: bool = False
    given: Mapping[str, Any] | None = None


def told(context: RankContext, ranks: Ranks) -> tuple[str, float]:
    """The verdict, and how long the step took."""
    rank, stage, began = context.rank, stage_of(context.rank), monotonic()
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
        check.gradients(ranks.given if rank else None)
        if optimizer is not None:
            optimizer.step()
    return check.verdict.details, monotonic() - began


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
    (said, _), (other, _) = simulated.run(told, RANKS[name], ranks=2)
    golden(said.splitlines()[0])
    assert said == other


def flows(context: RankContext) -> None:
    """What comes back to a stage that trains nothing."""
    for _ in range(COUNT):
        torch.distributed.recv(torch.empty(4, 8), context.rank + 1)


@pytest.mark.parametrize("clips", [False, True])
def test_gradients_of_unknown_names_are_said_at_once(clips: bool, world: World) -> None:
    ranks = Ranks(max_norms=CLIPPED if clips else (math.inf, math.inf), given={"nonsense": torch.zeros(3)})
    (said, took_s), (other, _) = world.run(told, ranks, ranks=2)
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


RUN = Run((0, 0, 1, 1, 2, 2, 3, 3), ("a", "b", "c", "d"), (None,) * 8)


def agreed(given: Sequence[tuple[str, ...] | None], *, together: int, run: Run = RUN) -> Agreed:
    """Seen from rank 5 of four lines, each of two stages."""
    arrivals = [Arrival({}, one, "") for one in given for _ in range(2)]
    return Agreed.of(run, 5, arrivals, [ChainStart(None, [k % 2], together=together) for k in range(8)], bound_s=1.0)


TWO_OF_TWO = [("a", "b"), ("a", "b"), ("c", "d"), ("c", "d")]
ONE_EACH = [("a",), ("b",), ("c",), ("d",)]
APART = replace(RUN, shares=((0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)))


def test_alike_lines_are_parts_of_cut_stages() -> None:
    found = agreed(TWO_OF_TWO, together=2)
    assert (found.alike, found.run.count, found.replicas, found.together) == ((0, 0, 2, 2), 4, 2, 2)
    assert found.replica_of_rank == [0, 0, 0, 0, 2, 2, 2, 2]
    assert (found.line, found.of_line(range(8))) == (2, [4, 5])
    every: Any = [{k % 2: StageCalls(k, (k, k))} for k in range(8)]  # calls, by a number of their own
    assert (found.of_parts(every, 1, 1), found.of_parts(every, 1, 3)) == ([(7,)], [])
    assert found.all_pairs([[k] for k in range(8)]) == [1, 5]


@pytest.mark.parametrize(
    ("given", "together", "run", "replicas", "known"),
    [
        (TWO_OF_TWO, 1, RUN, 4, False),
        ([("a",), ("a",), ("a",), ("b",)], 2, RUN, 4, False),
        (ONE_EACH, 2, RUN, 4, False),
        (ONE_EACH, 1, APART, 4, True),
        ([("a", "b")] * 4, 4, RUN, 1, True),
        ([("a", "b")] * 4, 2, RUN, 4, False),
    ],
)
def test_when_it_is_known_who_runs_what(
    given: list[tuple[str, ...]], together: int, run: Run, replicas: int, known: bool
) -> None:
    found = agreed(given, together=together, run=run)
    assert (found.replicas, not found.problems) == (replicas, known)


def test_replicas_divide_losses_and_not_their_parts() -> None:
    together = Run(RUN.replicas, ("a", "b", "a", "b", "c", "d", "c", "d"), ((0, 1),) * 8)
    found = agreed(TWO_OF_TWO, together=2, run=together)
    assert (found.own_divisor(None, 2), found.own_divisor(12.0, 2)) == (2.0, 6.0)
    assert Agreed().own_divisor(None, 3) == 3.0


STAGES = [[0], [1], [0], [1], [0]]


def parts(context: RankContext, dtype: torch.dtype) -> tuple[tuple[int, ...], list[list[float]]]:
    peers = Peers(context.rank, STAGES, bound_s=20)
    own = torch.full((context.rank, 2), float(context.rank)).to(dtype)
    assert [one.tolist() for one in Peers(0, [[0], [1]], 20).all_parts(torch.ones(2), [2])] == [[1.0, 1.0]], "alone"
    counts = [2 * rank for rank in peers.ranks]
    return peers.ranks, [one.float().tolist() for one in peers.all_parts(own, counts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_unequal_parts_come_from_peers(dtype: torch.dtype, world: World) -> None:
    found = world.run(parts, dtype, ranks=len(STAGES))
    for rank, (ranks, given) in enumerate(found):
        assert ranks == ((0, 2, 4) if rank % 2 == 0 else (1, 3))
        assert given == [[float(one)] * 2 * one for one in ranks]
