"""What the caller does meanwhile is done while workers are busy, and hides none of their failures."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from pipeproof.worlds.processes import Processes
from pipeproof.worlds.rank_report import Ending, RankReport
from pipeproof.worlds.shipping import pack_job, unpack
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.validation.worlds.test_world import BOUND_S, computes_for_ever, on_rank_1, raises, total

pytestmark = pytest.mark.pipeproof_ranks  # it starts processes


def sleeps(context: RankContext) -> None:
    time.sleep(0.3)


def endless(done: list[int], *, until: BaseException | None = None) -> Iterator[None]:
    """Short steps, counted in ``done``; the tenth raises ``until``."""
    while True:
        time.sleep(0.01)
        done.append(1)
        if until is not None and len(done) == 10:
            raise until
        yield


@pytest.fixture
def place() -> Iterator[Processes]:
    found = Processes("cpu")
    yield found
    found.close()


def answers(
    place: Processes,
    job: Callable[..., Any],
    *arguments: object,
    meanwhile: Iterable[object] = (),
    timeout_s: float = 60,
) -> Sequence[RankReport]:
    """The answers of two ranks."""
    order = pack_job(job, *arguments)
    return place.run(order, label="a test", ranks=2, timeout_s=timeout_s, meanwhile=meanwhile)


def results(place: Processes, job: Callable[..., Any], *arguments: object, **given: Any) -> list[Any]:
    """The results of two ranks."""
    return [unpack(answer.payload) for answer in answers(place, job, *arguments, **given)]


def is_sound(place: Processes) -> bool:
    return results(place, total, meanwhile=iter([1])) == [1.0, 1.0]


def test_steps_are_done_until_the_last_answer_is_there(place: Processes) -> None:
    assert is_sound(place)
    done: list[int] = []
    assert not any(answer.failed for answer in answers(place, sleeps, meanwhile=endless(done)))
    assert 3 < len(done) < 60


@pytest.mark.parametrize(("deed", "ending"), [(computes_for_ever, Ending.STUCK), (raises, Ending.RAISED)])
def test_work_without_end_hides_no_failure(place: Processes, deed: Callable[[], Any], ending: Ending) -> None:
    started_s = time.monotonic()
    timeout_s = BOUND_S if ending is Ending.STUCK else 60
    _, culprit = answers(place, on_rank_1, deed, meanwhile=endless([]), timeout_s=timeout_s)
    assert culprit.ending is ending
    assert time.monotonic() - started_s < 30
    assert is_sound(place)


@pytest.mark.sweep
def test_an_answer_that_comes_during_a_long_step_comes_in_time(place: Processes) -> None:
    assert is_sound(place)
    long = (time.sleep(0.5) for _ in range(1))
    assert not any(answer.failed for answer in answers(place, total, meanwhile=long, timeout_s=0.2))


@pytest.mark.sweep
def test_a_step_that_raises_ends_the_run(place: Processes) -> None:
    with pytest.raises(KeyboardInterrupt):
        answers(place, on_rank_1, computes_for_ever, meanwhile=endless([], until=KeyboardInterrupt()))
    assert is_sound(place)


@pytest.mark.parametrize(("most", "replaced"), [(2, True), (3, False), (None, False)])
def test_processes_in_which_jobs_leave_too_many_groups_are_replaced(most: int | None, replaced: bool) -> None:
    def grouping(context: RankContext, groups: int) -> int:
        for _ in range(groups):
            dist.new_group([0, 1])
        return os.getpid()

    with World(most_groups=most) as world:
        first = world.run(grouping, 2, ranks=2)
        assert world.run(grouping, 1, ranks=2) == first  # not more than allowed, or allowed
        after = world.run(grouping, 0, ranks=2)
        assert (set(after).isdisjoint(first), after == first) == (replaced, not replaced)
