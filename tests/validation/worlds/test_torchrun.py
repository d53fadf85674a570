"""Under torchrun every rank gets the same results or the same failure, and a failure on one rank is no end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.golden import golden
from tests.support.warm_start import Ended

SCRIPT = """
import json, os, sys, time
import torch
import torch.distributed as dist
from pipeproof.pipeline.waiting import waiting
from pipeproof.worlds.side_store import RanksAbsent, side_store
from pipeproof.worlds.world import World
from pipeproof.worlds.rank_report import NeedsMoreRanks, RankFailed

RANK = int(os.environ["RANK"])
world = World()

def total(context):
    mine = torch.tensor([float(context.rank + 1)])
    dist.all_reduce(mine, group=context.group)
    return mine.item()

def place(context):
    return os.getpid(), context.ranks, os.environ["WORLD_SIZE"], "TORCHELASTIC_RUN_ID" in os.environ

def raises(context):
    if context.rank == 1:
        raise ValueError("bad split")
    dist.barrier()

def exits(context):
    if context.rank == 0:
        os._exit(3)
    dist.barrier()

def hangs(context):
    if context.rank == 0:
        with waiting("1RECV_F0 from rank 1"):
            dist.recv(torch.zeros(1), 1)

def told(job, *args, **options):
    started_s = time.monotonic()
    try:
        result = world.run(job, *args, **{"ranks": 2} | options)
    except (RankFailed, NeedsMoreRanks) as error:
        result = str(error)
    return {"result": result, "sound": world.run(total, ranks=2) == [3.0, 3.0], "s": time.monotonic() - started_s}

def exchange(bound_s):
    try:
        return side_store().gather(str(RANK), what="the meeting", bound_s=bound_s)
    except RanksAbsent as absent:
        return absent.reasons

observed = {
    "place": told(place),
    "again": told(place),
    "one": told(place, ranks=1),
    "raises": told(raises),
    "exits": told(exits),
    "hangs": told(hangs, timeout_s=1.0),
    "more": told(total, ranks=3),
    "another job": told(raises if RANK == 0 else total),
}
observed["met"] = exchange(60.0)
if RANK == 1:
    time.sleep(1.5)
observed["late"] = exchange(0.5)
observed["met again"] = exchange(60.0)
if RANK == 1:
    side_store().leave("it had enough")
else:
    observed["left"] = exchange(60.0)
world.close()
with open(f"rank-{RANK}.json", "w") as file:
    json.dump(observed, file)
"""


@pytest.fixture(scope="module")
def observed(torchrun: Callable[..., Ended], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two ranks saw: one launch for all tests, as a launch takes seconds."""
    folder: Path = tmp_path_factory.mktemp("torchrun")
    (folder / "script.py").write_text(SCRIPT)
    launched = torchrun(folder, "script.py", ranks=2)
    assert launched.returncode == 0, launched.stdout
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def both(observed: list[Any], name: str) -> Any:
    """What both ranks were told alike."""
    assert observed[0][name]["result"] == observed[1][name]["result"]
    assert observed[0][name]["sound"]
    assert observed[1][name]["sound"]
    return observed[0][name]["result"]


def test_every_rank_has_all_results(observed: list[Any]) -> None:
    first, second = both(observed, "place")
    assert first[0] != second[0]
    assert first[1:] == second[1:] == [2, "2", False]
    assert both(observed, "again") == [first, second], "workers are used again"


@pytest.mark.sweep
def test_a_run_may_need_fewer_ranks(observed: list[Any]) -> None:
    [[pid, *rest]] = both(observed, "one")
    assert rest == [1, "1", False]
    assert pid not in [pid for pid, *_ in both(observed, "place")], "it is the worker of another group"


def test_a_failure_is_the_same_on_every_rank(observed: list[Any]) -> None:
    golden(both(observed, "raises").splitlines()[0])
    golden(both(observed, "exits").partition("\nrank 1: ")[0])
    assert max(rank["raises"]["s"] for rank in observed) < 30


def test_a_hang_ends_with_the_bound(observed: list[Any]) -> None:
    hang = both(observed, "hangs")
    golden(hang.splitlines()[0])
    assert "in hangs\n" in hang
    assert hang.endswith("rank 1: finished")


def test_more_ranks_than_there_are_cannot_be_had(observed: list[Any]) -> None:
    golden(both(observed, "more"))


def test_ranks_that_run_different_jobs_are_told_so(observed: list[Any]) -> None:
    for rank in observed:
        golden(rank["another job"]["result"], lines="^rank 1 of 2 ")
        assert rank["another job"]["sound"]


def test_a_rank_that_comes_late_or_never_is_named_by_both_sides(observed: list[Any]) -> None:
    assert observed[0]["met"] == observed[1]["met"] == ["0", "1"]
    assert [one.keys() for one in (observed[0]["late"], observed[1]["late"], observed[0]["left"])] == [{"1"}] * 3
    golden("\n".join([observed[0]["late"]["1"], observed[1]["late"]["1"], observed[0]["left"]["1"]]))
    assert observed[0]["met again"] == observed[1]["met again"] == ["0", "1"]
