"""A world gives every rank's result in order, blames the right rank for a failure, and is sound again after it."""

import contextlib
import dataclasses
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeproof.pipeline.waiting import waiting
from pipeproof.worlds.accelerator import detect
from pipeproof.worlds.rank_report import Ending, RankFailed, WorldError
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden

BOUND_S = 1.0  # for jobs that hang on purpose


@dataclasses.dataclass
class Mine:
    """A class of a test module, which no worker can import."""

    value: int


class BadSplit(ValueError):
    """A user's bad input, as a library would raise it."""


def total(context: RankContext, addend: int = 0) -> float:
    """The sum over ranks of rank + addend, through the group."""
    mine = torch.tensor([float(context.rank + addend)])
    dist.all_reduce(mine, group=context.group)
    return mine.item()


def sound(world: World) -> bool:
    """Whether the next run on the same number of ranks is as if nothing had happened."""
    return world.run(total, ranks=2) == [1.0, 1.0]


def test_results_come_in_rank_order(world: World) -> None:
    def job(context: RankContext) -> tuple[int, int, str]:
        time.sleep(0.05 * (context.ranks - context.rank))  # so that the last rank is done first
        return context.rank, context.ranks, context.device

    assert world.run(job, ranks=2) == [(0, 2, "cpu"), (1, 2, "cpu")]


def test_arguments_and_results_are_copies_of_any_kind(world: World) -> None:
    weights, factor = torch.arange(3.0), 2  # the closure and the argument both travel

    def job(context: RankContext, mine: Mine) -> tuple[Mine, torch.Tensor]:
        mine.value += context.rank
        return mine, weights.mul_(factor)

    mine = Mine(5)
    assert [result for result, _ in world.run(job, mine, ranks=2)] == [Mine(5), Mine(6)]
    assert mine == Mine(5)
    assert torch.equal(world.run(job, mine, ranks=2)[1][1], torch.tensor([0.0, 2.0, 4.0]))
    assert torch.equal(weights, torch.arange(3.0))


@pytest.mark.sweep
def test_a_result_may_be_larger_than_a_store_takes_at_once(world: World) -> None:
    results = world.run(lambda context: torch.full((2_300_000,), context.rank), ranks=2)
    assert [int(result.sum()) for result in results] == [0, 2_300_000]


def test_the_group_has_exactly_the_ranks_also_with_several_sizes_at_once(world: World) -> None:
    for _ in range(2):
        assert world.run(total, 1, ranks=2) == [3.0, 3.0]
        assert world.run(total, 1, ranks=1) == [1.0]
    assert world.run(total, 1, ranks=3) == [6.0, 6.0, 6.0]


def test_processes_are_used_again(world: World) -> None:
    def pids() -> list[int]:
        return world.run(lambda context: os.getpid(), ranks=2)

    first = pids()
    assert len({*first, os.getpid()}) == 3
    assert pids() == first


def test_a_job_runs_in_the_folder_of_its_caller(world: World, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (folder := tmp_path / name).mkdir()
        with contextlib.chdir(folder):
            assert world.run(lambda context: Path.cwd(), ranks=2) == [folder] * 2


@pytest.mark.sweep
def test_a_rank_computes_with_one_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    threads = world.run(lambda context: (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]), ranks=2)
    assert threads == [(1, "1")] * 2


def test_a_world_wants_ranks_a_bound_and_a_device_that_exist(world: World) -> None:
    with pytest.raises(ValueError, match="at least 1 rank, not 0"):
        world.run(total, ranks=0)
    with pytest.raises(ValueError, match="timeout_s is -1: expected seconds above 0"):
        world.run(total, ranks=1, timeout_s=-1)
    with pytest.raises(ValueError, match="timeout_s is '2': expected seconds above 0"):
        World(timeout_s="2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_s is inf: expected seconds above 0, and at most 1e"):
        World(timeout_s=float("inf"))
    with pytest.raises(ValueError, match="unknown device 'tpu': torch names cpu, cuda"):
        World(device="tpu")


def on_rank_1(context: RankContext, deed: Callable[[], Any], awaited: bool = True) -> Any:
    """The deed, which the other rank waits for, or has nothing to do with."""
    made = deed() if context.rank == 1 else None
    if awaited:
        dist.barrier()
    return made


def raises() -> None:
    raise BadSplit("3 layers, 4 stages")


def asserts(context: RankContext) -> None:
    assert total(context) == context.rank, "a sum is no rank"


def crashes() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def raises_no_exception() -> None:
    raise KeyboardInterrupt("by itself")


def computes_for_ever() -> None:
    while True:
        pass


def stays_in_native_code() -> None:
    import ctypes

    ctypes.PyDLL(None).sleep(60)  # with the interpreter's lock


def rank_0_waits_for_a_send(context: RankContext) -> None:
    if context.rank == 0:
        with waiting("1RECV_F0 from rank 1"):
            dist.recv(torch.zeros(1), 1)


FAILURES: dict[str, tuple[Callable[[], Any], Ending, str]] = {
    "raises": (raises, Ending.RAISED, r"raised .*BadSplit: 3 layers, 4 stages\n(.*\n)*.*in raises\n"),
    "exits": (partial(os._exit, 3), Ending.DIED, r"exited with status 3\n"),
    "exits politely": (partial(sys.exit, "enough"), Ending.RAISED, r"raised SystemExit: enough\n"),
    "crashes": (crashes, Ending.DIED, r"was killed by SIGSEGV\n(.*\n)*.* in crashes\n"),
    "skips alone": (
        partial(pytest.skip, "not on mine"),
        Ending.SKIPPED,
        r"skipped alone: not on mine\nrank 0: finished",
    ),
    "raises no exception": (raises_no_exception, Ending.RAISED, r"raised KeyboardInterrupt: by itself\n"),
    "returns a lock": (threading.Lock, Ending.RAISED, "raised TypeError: its result, a lock, cannot be sent back"),
    "computes": (computes_for_ever, Ending.STUCK, r"did not finish within 1 s\n(.*\n)*.*in computes_for_ever\n"),
    "native code": (stays_in_native_code, Ending.STUCK, r"did not finish within 1 s\n    busy in native code\n"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("failure", FAILURES)
def test_the_culprit_comes_first_and_the_next_run_is_sound(world: World, failure: str) -> None:
    deed, ending, told = FAILURES[failure]
    timeout_s, started_s = BOUND_S if ending is Ending.STUCK else 60, time.monotonic()
    with pytest.raises(RankFailed) as caught:
        world.run(on_rank_1, deed, ending is not Ending.SKIPPED, ranks=2, timeout_s=timeout_s)
    said = str(caught.value).removeprefix("rank 1 of 2 ")
    assert re.match(told, said), said
    assert time.monotonic() - started_s < 30  # a failure does not wait for the bound
    assert caught.value.culprit == 1
    assert [report.rank for report in caught.value.reports] == [0, 1]
    assert caught.value.reports[1].ending is ending
    assert sound(world)


def test_a_wait_for_what_nobody_sends_ends_with_who_waits_and_where(world: World) -> None:
    started_s = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        world.run(rank_0_waits_for_a_send, ranks=2, timeout_s=BOUND_S)
    assert time.monotonic() - started_s < BOUND_S + 10
    golden(str(caught.value).splitlines()[0])
    assert "in rank_0_waits_for_a_send\n" in str(caught.value)
    assert str(caught.value).endswith("\nrank 1: finished")
    assert sound(world)


@pytest.mark.sweep
def test_an_assertion_tells_the_values_it_compared(world: World) -> None:
    with pytest.raises(RankFailed, match=r"AssertionError: a sum is no rank\nassert 1\.0 == 0") as caught:
        world.run(asserts, ranks=2)
    assert "assert total(context) ==" in str(caught.value)


@pytest.mark.sweep
def test_what_all_ranks_raise_alike_is_told_once(world: World) -> None:
    def job(context: RankContext) -> None:
        raise BadSplit("no layers")

    with pytest.raises(RankFailed) as caught:
        world.run(job, ranks=2)
    golden(str(caught.value).splitlines()[0])
    assert str(caught.value).count("Traceback") == 1


def test_bad_input_found_on_a_rank_can_be_raised_again_here(world: World) -> None:
    with pytest.raises(RankFailed) as caught:
        world.run(on_rank_1, raises, ranks=2)
    assert isinstance(caught.value.cause, BadSplit)
    golden(str(caught.value.cause))

    with pytest.raises(RankFailed) as caught:
        world.run(on_rank_1, partial(sys.exit, "enough"), ranks=2)
    assert caught.value.cause is None


def test_a_skip_of_all_ranks_is_a_skip(world: World) -> None:
    def job(context: RankContext) -> None:
        pytest.skip("nobody likes it")

    with pytest.raises(pytest.skip.Exception, match="nobody likes it"):
        world.run(job, ranks=2)
    assert sound(world)


def test_a_result_that_cannot_be_read_is_told(world: World) -> None:
    class Sour:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return int, ("no number",)

    with pytest.raises(WorldError, match=r"result of rank 0 cannot be read here: ValueError.*no number"):
        world.run(lambda context: Sour(), ranks=2)
    assert sound(world)


@pytest.mark.skipif(detect() == "cuda", reason="there is a GPU")
@pytest.mark.pipeproof_ranks
def test_a_device_that_is_not_here_is_bad_input() -> None:
    with (
        World(device="cuda") as world,
        pytest.raises(RankFailed, match="ranks cannot compute on cuda: torch finds no cuda device here") as caught,
    ):
        world.run(total, ranks=1)
    assert isinstance(caught.value.cause, ValueError)


def is_alive(pid: int) -> bool:
    """Whether there is a process with this id that has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_closing_ends_all_processes(world: World) -> None:
    with World() as mine:
        pids = mine.run(lambda context: os.getpid(), ranks=2)
    deadline_s = time.monotonic() + 10  # the other ranks close theirs in their own time
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in pids)
    assert sound(world), "another world is no concern of this one"


def leave_a_group(context: RankContext) -> None:
    """What a runtime does that keeps its groups in globals."""
    torch.left = dist.new_group([0, 1])  # type: ignore[attr-defined]


def set_up(context: RankContext) -> int:
    if hasattr(torch, "left"):
        raise RuntimeError("data parallel group is already initialized")
    return context.rank


def test_what_earlier_jobs_left_is_said_where_one_fails(world: World) -> None:
    world.run(leave_a_group, ranks=2)
    with pytest.raises(RankFailed) as caught:
        world.run(set_up, ranks=2)
    told = str(caught.value)
    assert "RuntimeError: data parallel" in told
    assert told.count("pipeproof_fresh_ranks") == 2, "in the message and in the traceback"
    world.run(leave_a_group, ranks=2)  # for the next test


@pytest.mark.pipeproof_fresh_ranks
def test_fresh_ranks_have_nothing_of_earlier_jobs(world: World) -> None:
    assert world.run(set_up, ranks=2) == [0, 1]
    world.run(leave_a_group, ranks=2)


def test_what_fresh_ranks_were_left_with_is_gone_after_them(world: World) -> None:
    assert world.run(set_up, ranks=2) == [0, 1]


def ends_as_a_script_does(context: RankContext, leaving: int) -> int:
    if context.rank < leaving:
        dist.destroy_process_group()
    return context.rank


@pytest.mark.sweep
@pytest.mark.parametrize("leaving", [1, 2])
def test_a_job_that_destroys_the_group_of_all_ranks_leaves_it_to_the_next(leaving: int, world: World) -> None:
    assert world.run(ends_as_a_script_does, leaving, ranks=2) == [0, 1]
    assert world.run(total, ranks=2) == [1.0, 1.0]


def dies_loudly(context: RankContext) -> None:
    os.write(2, b"noise\n")
    os._exit(7)


@pytest.mark.pipeproof_ranks  # it starts processes
def test_what_a_silent_rank_printed_shows_once_it_dies(capfd: pytest.CaptureFixture[str]) -> None:
    with World(silent=True) as world, pytest.raises(RankFailed, match=r"exited with status 7\n +noise"):
        world.run(dies_loudly, ranks=1)
    assert "noise" not in capfd.readouterr().err
