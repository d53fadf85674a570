"""A worker obeys one controller: it lives as long as that, in that one's environment, and under its signals."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeproof.pipeline.lanes import second_lane
from pipeproof.worlds.launcher import Seat
from pipeproof.worlds.processes import Processes
from pipeproof.worlds.rank_report import Ending
from pipeproof.worlds.worker import RankContext, _settle
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.warm_start import Ended
from tests.validation.worlds.test_processes import answers, results

ORPHANS = """
import os, signal, sys, time
from pipeproof.worlds.world import World

def hang(context):
    os.write(1, f"{os.getpid()}\\n".encode())  # whole: both ranks write
    time.sleep(100)

def tell(context):
    return os.getpid()

world = World()
if sys.argv[1] == "killed":
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    world.run(tell, ranks=2)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    world.run(hang, ranks=2)
else:
    print(*world.run(tell, ranks=2), sep="\\n", flush=True)
"""


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """A place of our own, for a look at single answers."""
    place = Processes("cpu")
    yield place
    place.close()


def gone(pids: list[int], bound_s: float) -> bool:
    """Whether all these processes have ended, or do so within the bound."""
    deadline_s = time.monotonic() + bound_s
    while pids and time.monotonic() < deadline_s:
        pids = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        time.sleep(0.02)
    return not pids


def test_a_worker_has_the_environment_of_now(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    processes.close()  # a worker takes its environment once, when it starts
    monkeypatch.setenv("PIPEPROOF_TEST", "now")
    assert results(processes, lambda context: os.environ["PIPEPROOF_TEST"]) == ["now", "now"]
    assert results(processes, lambda context: os.environ["LOCAL_RANK"]) == ["0", "1"]


def test_a_worker_finds_modules_where_the_controller_does(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert results(processes, lambda context: context.rank) == [0, 1]  # it has started
    (tmp_path / "late_module.py").write_text("def job(context): return 'late'\n")
    monkeypatch.syspath_prepend(tmp_path)
    import late_module  # type: ignore[import-not-found]

    assert results(processes, late_module.job) == ["late", "late"]


def test_ctrl_c_is_for_the_controller(processes: Processes) -> None:
    def job(context: RankContext) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "unharmed"

    assert results(processes, job) == ["unharmed", "unharmed"]


def test_ctrl_c_in_the_controller_ends_the_workers(processes: Processes) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    pids = results(processes, lambda context: os.getpid())
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            answers(processes, lambda context: time.sleep(60))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert gone(pids, 5.0)
    assert results(processes, lambda context: context.rank) == [0, 1]


def test_a_worker_that_dies_between_runs_is_told(processes: Processes) -> None:
    pids = results(processes, lambda context: os.getpid())
    os.kill(pids[1], signal.SIGKILL)
    assert gone(pids[1:], 5.0)
    told = answers(processes, lambda context: None)
    assert told[1].ending is Ending.DIED
    golden(told[1].message)
    assert results(processes, lambda context: context.rank) == [0, 1]


def test_a_worker_that_is_stopped_ends_with_the_bound(processes: Processes) -> None:
    def job(context: RankContext) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    told = answers(processes, job, timeout_s=0.5)
    assert {answer.ending for answer in told} == {Ending.STUCK}
    assert results(processes, lambda context: context.rank) == [0, 1]


@pytest.mark.parametrize("end", ["killed", "in peace"])
def test_no_worker_outlives_its_controller(python: Callable[..., Ended], tmp_path: Path, end: str) -> None:
    # The script has no `__main__` guard: a worker must not run it again.
    (tmp_path / "script.py").write_text(ORPHANS)
    launched = python(tmp_path, "script.py", end)
    assert launched.returncode == (-signal.SIGKILL if end == "killed" else 0), launched.stdout
    pids = [int(line) for line in launched.stdout.split()]
    assert len(pids) == 2
    assert gone(pids, 10.0)


def test_a_worker_whose_folder_is_gone_ends_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its controller was interrupted while it started."""

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    gone = str(tmp_path / "gone")
    with pytest.raises(SystemExit, match=r"^0$"):
        _settle(Seat(rank=0, ranks=1, local_rank=0, local_ranks=1, device="cpu", store=f"file://{gone}", folder=gone))


@pytest.mark.sweep
def test_ctrl_c_is_kept_from_workers_and_not_from_their_controller(processes: Processes) -> None:
    def blocked(context: RankContext) -> bool:
        return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])

    assert results(processes, blocked) == [True, True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


GROUPS = 8


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_group_has_no_device_of_its_own(world: World) -> None:
    def counted(context: RankContext) -> list[int]:
        dist.new_group([0, 1])  # the first one may start what all need
        counts = [threads()]
        for _ in range(GROUPS):
            dist.new_group([0, 1])
        counts.append(threads())
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [dist.ProcessGroupGloo.create_default_device()], timedelta(seconds=30)
        options._threads = 2
        alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
        assert alone.size() == 1
        return [*counts, threads()]

    for first, then, given in world.run(counted, ranks=2):
        assert then - first == 2 * GROUPS
        assert given - then == 3, "who brings a device has that one"


def device_threads() -> int:
    names = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
    return sum("gloo_tcp_loop" in name for name in names)


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_second_lane_and_a_group_with_a_bound_in_place_have_none_either(world: World) -> None:
    def counted(context: RankContext) -> list[int]:
        counts = [device_threads()]
        group = dist.new_group([0, 1])
        assert isinstance(group, dist.ProcessGroup)
        assert second_lane(group) is not None
        counts.append(device_threads())
        alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
        assert alone.size() == 1
        return [*counts, device_threads()]

    for first, with_lane, with_bound in world.run(counted, ranks=2):
        assert (with_lane, with_bound) == (first, first)
        assert first > 0


def test_messages_of_several_groups_stay_apart(world: World) -> None:
    def exchanged(context: RankContext) -> list[float]:
        groups = [dist.new_group([0, 1], timeout=timedelta(seconds=30)) for _ in range(GROUPS)]
        numbers = [torch.full((3,), float(context.rank + 1)) * (k + 1) for k in range(GROUPS)]
        order = groups if context.rank == 0 else groups[::-1]
        works = {g: dist.all_reduce(numbers[groups.index(g)], group=g, async_op=True) for g in order}
        for work in works.values():
            work.wait()
        other = 1 - context.rank
        sent = [dist.isend(torch.tensor([float(k)]), other, group=groups[k]) for k in range(GROUPS)]
        received = []
        for k in reversed(range(GROUPS)):
            number = torch.empty(1)
            dist.recv(number, other, group=groups[k])
            received.append(number.item())
        for one in sent:
            one.wait()
        return [*(one[0].item() for one in numbers), *received]

    expected = [*(3.0 * (k + 1) for k in range(GROUPS)), *(float(k) for k in reversed(range(GROUPS)))]
    assert world.run(exchanged, ranks=2) == [expected, expected]
