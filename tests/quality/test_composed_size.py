"""A model of eight times what a rank may hold is held against itself, under a bound that the system keeps."""

import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof import StageByStage, check_step
from pipeproof.core.verdict import Verdict
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.chained import LOSS, Faults, Step, backwards, forwards, named
from tests.support.sweeps import SWEEP

pytestmark = pytest.mark.long

RANKS, WIDTH, LAYERS, MICROBATCHES, ROWS = 8, 2048, 4, 4, 16
STAGE = LAYERS * WIDTH * WIDTH * 4  # bytes: 64 MB
ROOM = 6 * STAGE  # of which a step alone takes more than four: weights, gradients, what a backward and its threads need


@pytest.fixture
def eight() -> Iterator[World]:
    """Ranks of their own: a bound cannot be taken back."""
    with World(silent=True, timeout_s=120.0) as world:
        yield world


def taken() -> int:
    """The bytes of data that this process has."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "a process on Linux has data"
    return int(found[1]) << 10


def bounded(context: RankContext) -> tuple[str, Verdict]:
    """A checked step of a rank that may hold no more than its own stage takes, and what the whole model gives there."""
    rank, last = context.rank, context.ranks - 1
    dist.barrier()
    most = taken() + ROOM
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    torch.manual_seed(rank)
    stage = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    draw = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)) for _ in range(4)]
    given, at = pairs if rank in (0, last) else None, Step(rank, context.ranks)
    with check_step(stage, given, against=StageByStage(LOSS), rename=named) as check:
        forwards(at, stage, pairs, Faults())
        backwards(at, len(pairs), Faults())
        check.gradients()
        check.report(losses=at.losses or None)
    try:
        whole = [torch.empty(STAGE // 4) for _ in range(RANKS)]
    except RuntimeError as error:
        return str(error), check.verdict
    return f"{len(whole)} stages fit", check.verdict


@SWEEP  # it takes half a minute, and what it bounds seldom changes
def test_a_model_of_eight_times_what_a_rank_may_hold_is_checked(eight: World) -> None:
    for whole, verdict in eight.run(bounded, ranks=RANKS):
        assert "can't allocate memory" in whole, "the bound is there, and the whole model is beyond it"
        assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), str(verdict)
