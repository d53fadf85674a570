"""A job of any framework that trains on ranks of its own: a step is checked or recorded, then it goes on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeproof import World
from pipeproof.core.verdict import Verdict
from pipeproof.records.compare import compare
from pipeproof.records.record import Record
from pipeproof.records.record_file import read
from pipeproof.worlds.worker import RankContext
from tests.frameworks.fault import named, passed
from tests.frameworks.left import differences, seed

Cause = tuple[str, str]  # its kind and its place


@dataclass(frozen=True)
class Job:
    """A job on this rank.

    made: what its framework made. data: what it trains in a step. others: the same of other words. check: of a step of
    ``data``, by itself or not. train: takes a step of what it is given. state: what a check has to leave as it was.
    record: of a step of ``data``, into a file. clean: whether nothing of a check is left.
    """

    made: Any
    data: Any
    others: Any
    check: Callable[[bool], AbstractContextManager[Any]]
    train: Callable[[Any], None]
    state: Callable[[], dict[str, Any]]
    record: Callable[[str], AbstractContextManager[Any]] | None = None
    clean: Callable[[], bool] | None = None


Opened = Callable[[Any, str], AbstractContextManager[Job]]  # of a layout, and a fault or none


def checked(_: RankContext, opened: Opened, layout: Any, fault: str = "", by_itself: bool = False) -> Verdict:
    """The verdict on a step that has a fault, or none."""
    with opened(layout, fault) as job:
        with job.check(by_itself) as check:
            job.train(job.data)
        return check.verdict  # type: ignore[no-any-return]


def checked_and_unchecked(
    _: RankContext, opened: Opened, layout: Any, by_itself: bool = False
) -> tuple[Verdict, list[str]]:
    """The verdict on a right step, and what is another after it and one more than in a job without a check."""
    found = []
    for check_it in (False, True):
        with opened(layout, "") as job:
            seed()
            with job.check(by_itself) if check_it else nullcontext() as check:
                job.train(job.data)
            first = job.state()
            job.train(job.data)
            found.append([first, job.state()])
    dist.barrier()
    assert check is not None, "the second job was checked"
    return check.verdict, differences(*found)


def recorded(_: RankContext, opened: Opened, layout: Any, path: str, fault: str = "") -> str:
    """Record a step that has a fault, or none; why that cannot be."""
    with opened(layout, fault) as job:
        assert job.record is not None, "this job's steps are recorded"
        with job.record(path) as observed:
            job.train(job.data)
        return observed.problem  # type: ignore[no-any-return]


def ended_early(_: RankContext, opened: Opened, layout: Any) -> tuple[str, str, bool]:
    """What a step that raises on every rank raises, the verdict on it, and whether all is as it was."""
    with opened(layout, "") as job:
        assert job.clean is not None, "what a check leaves is known"
        try:
            with job.check(False) as found:
                raise KeyError("the job's own")
        except KeyError as error:
            return repr(error), found.verdict.details, job.clean()
    raise AssertionError("what the job raises is the job's")


def drew(_: RankContext, opened: Opened, layout: Any, kind: str) -> Verdict:
    """The verdict on a right step: of other words than the check was given, in another order, or twice."""
    with opened(layout, "") as job:
        with job.check(False) as check:
            for given in {"others": [job.others], "reversed": [job.data[::-1]], "twice": [job.data] * 2}[kind]:
                job.train(given)
        return check.verdict  # type: ignore[no-any-return]


def ranks_of(layout: Any) -> int:
    return int(layout.pp * layout.dp)


def assert_right(
    world: World, opened: Opened, layout: Any, tier: str | None, laws: set[str], *, by_itself: bool = False
) -> None:
    """A right step passes to that ``tier``, these laws hold, and the job is as without a check."""
    for verdict, harmed in world.run(checked_and_unchecked, opened, layout, by_itself, ranks=ranks_of(layout)):
        assert verdict.outcome == "pass", str(verdict)
        assert tier in (None, verdict.tier), str(verdict)
        assert passed(verdict) >= laws, str(verdict)
        assert harmed == []


def assert_named(
    world: World, opened: Opened, layout: Any, fault: str, causes: Cause | list[Cause], *, by_itself: bool = False
) -> None:
    """A step with a fault fails with these causes, or where one is given, with that one first."""
    for verdict in world.run(checked, opened, layout, fault, by_itself, ranks=ranks_of(layout)):
        outcome, found = named(verdict)
        expected, found = (causes, found) if isinstance(causes, list) else ([causes], found[:1])
        assert (outcome, found) == ("fail", expected), str(verdict)


def assert_its_own(world: World, opened: Opened, layout: Any) -> None:
    """What a job raises is its own, and no verdict."""
    for raised, told, clean in world.run(ended_early, opened, layout, ranks=ranks_of(layout)):
        assert (raised, clean) == ('KeyError("the job\'s own")', True)
        assert told.startswith("ERROR rank 0 raised KeyError")


def assert_other_data_is_said(world: World, opened: Opened, layout: Any) -> None:
    """A step of other data than was given is no wrong step."""
    for verdict in world.run(drew, opened, layout, "others", ranks=ranks_of(layout)):
        assert verdict.outcome == "unknown", str(verdict)
        assert "the job drew data that is in none of the microbatches given to the check" in verdict.details


def assert_any_order_passes(world: World, opened: Opened, layout: Any) -> None:
    """The order in which a job draws what was given is its own."""
    for verdict in world.run(drew, opened, layout, "reversed", ranks=ranks_of(layout)):
        assert verdict.outcome == "pass", str(verdict)
        assert "loss" in passed(verdict)


def compared(world: World, opened: Opened, layout: Any, folder: Path, expected: Record, fault: str = "") -> Verdict:
    """A recorded step of a job beside what one device gives."""
    path, ranks = str(folder / "step.safetensors"), ranks_of(layout)
    assert world.run(recorded, opened, layout, path, fault, ranks=ranks) == [""] * ranks
    return compare(expected, read(path))
