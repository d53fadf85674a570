"""Part c: fuzz cases per second, against a world spawned for each case."""

import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_table import Row, Target, ratio
from hypothesis import HealthCheck, Phase, given, settings

from pipeproof import Case, World
from pipeproof.own.fuzz import cases
from pipeproof.own.judgement import judge
from pipeproof.own.observe import observe, observe_rank
from pipeproof.own.validator import validate
from pipeproof.worlds.worker import RankContext

_LEAST = 20.0


def measure(*, ranks: int, rounds: int) -> list[Row]:
    """Cases per second of the same cases, each run in a kept world, and in one spawned for it; both are judged.

    ``ranks``: how many the cases have. A round is one case, run both ways.
    """
    kept, spawned = [], []
    with World() as world:
        validate(drawn(ranks, 1)[0], world)  # the first pool starts the fork server
        for case in drawn(ranks, rounds):
            kept.append(_timed(lambda case=case: validate(case, world)))
            observed = observe(case, world)
            spawned.append(_timed(lambda case=case: _spawn(case)) + _timed(lambda c=case, o=observed: judge(c, o)))
    speeds = {"kept world": rounds / sum(kept), "spawn per case": rounds / sum(spawned)}
    times = Target("times as fast", ratio(spawned, kept), _LEAST, least=True)
    return [Row("fuzz cases", speeds, [times])]


def drawn(ranks: int, count: int) -> list[Case]:
    """The first ``count`` fuzz cases of this many ranks; the same ones at every call."""
    found: list[Case] = []

    @settings(
        max_examples=40 * count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def draw(case: Case) -> None:
        if case.ranks == ranks and len(found) < count:
            found.append(case)

    draw()
    return found


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _spawn(case: Case) -> None:
    """What a test does that starts its own ranks: spawn them, join them, run the case, end them."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (case, f"file://{folder}/store"), nprocs=case.ranks)


def _rank(rank: int, case: Case, address: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=case.ranks)
    group = dist.group.WORLD
    assert group is not None, "the group was made a line ago"
    observe_rank(RankContext(rank, case.ranks, "cpu", group), case)
    dist.barrier()
