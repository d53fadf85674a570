"""Lines of ranks are replicas of each other or parts of one; losses are divided by what replicas have together."""

from collections.abc import Sequence

import pytest

from pipeproof.records.rank_part import Arrival, Run
from pipeproof.wings.composed.lines import RankLines

RUN = Run((0, 0, 1, 1, 2, 2, 3, 3), ("a", "b", "c", "d"), (None,) * 8)


def lines(given: Sequence[tuple[str, ...] | None], *, together: int, rank: int = 5, run: Run = RUN) -> RankLines:
    arrivals = [Arrival({}, one, "") for one in given for _ in range(2)]
    return RankLines.of(run, rank, arrivals, together=together)


TWO_OF_TWO = [("a", "b"), ("a", "b"), ("c", "d"), ("c", "d")]


def test_lines_that_run_the_same_are_parts_of_one_replica_where_stages_are_cut_inside() -> None:
    found = lines(TWO_OF_TWO, together=2)
    assert (found.data, found.count, found.replicas, found.together) == ((0, 0, 2, 2), 4, 2, 2)
    assert found.replica_of_rank == [0, 0, 0, 0, 2, 2, 2, 2]
    assert (found.own, found.of_line(range(8))) == (2, [4, 5])
    assert lines(TWO_OF_TWO, together=1).replicas == 4


@pytest.mark.parametrize("given", [[("a",), ("a",), ("a",), ("b",)], [("a",), ("b",), ("c",), ("d",)]])
def test_other_lines_are_replicas(given: list[tuple[str, ...]]) -> None:
    assert lines(given, together=2).replicas == 4


def test_it_is_known_whose_microbatches_are_whose_where_all_say_so_or_all_run_the_same() -> None:
    apart = Run(RUN.replicas, RUN.microbatches, ((0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)))
    assert lines([("a", "b")] * 4, together=4).split
    assert not lines([("a", "b")] * 4, together=2).split
    assert not lines([("a", "b")] * 4, together=1).split
    assert lines([("a",), ("b",), ("c",), ("d",)], together=1, run=apart).split


def test_losses_are_divided_by_the_microbatches_of_replicas_and_not_of_their_parts() -> None:
    together = Run(RUN.replicas, ("a", "b", "a", "b", "c", "d", "c", "d"), ((0, 1),) * 8)
    found = lines(TWO_OF_TWO, together=2, run=together)
    assert (found.own_divisor(None, 2), found.own_divisor(12.0, 2)) == (2.0, 6.0)
    assert RankLines().own_divisor(None, 3) == 3.0
