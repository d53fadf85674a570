"""The culprit is the earliest failure that is no echo of another rank's, and the story starts with it."""

import pickle
from dataclasses import replace

import pytest

from pipeproof.worlds.rank_report import (
    Ending,
    NeedsMoreRanks,
    RankFailed,
    RankReport,
    culprit_of,
    describe,
    details,
    find_circles,
    headline,
)
from tests.support.golden import golden

GLOO = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:25993: Connection reset by peer. Check the logs."


def raised(rank: int, message: str = "ValueError: bad split", at_s: float = 0.0) -> RankReport:
    """A rank that raised."""
    return RankReport(rank, Ending.RAISED, message, f"Traceback of rank {rank}\n", at_s=at_s)


FINISHED = RankReport(0, Ending.FINISHED)


@pytest.mark.parametrize(
    ("reports", "culprit"),
    [
        ([FINISHED, raised(1)], 1),
        ([raised(0, at_s=2.0), raised(1, at_s=1.0)], 1),
        ([raised(0, GLOO, at_s=1.0), raised(1, at_s=2.0)], 1),
        ([raised(0, GLOO, at_s=1.0), RankReport(1, Ending.DIED, "exited with status 3", at_s=2.0)], 1),
        ([raised(0, GLOO, at_s=2.0), raised(1, GLOO, at_s=1.0)], 1),
        ([RankReport(0, Ending.STOPPED), raised(1, GLOO)], 1),
        ([RankReport(0, Ending.STUCK, waiting="1RECV_F0"), RankReport(1, Ending.STUCK)], 1),
        ([RankReport(rank, Ending.STUCK, waiting="a message", at_s=2.0 - rank) for rank in range(2)], 0),
        ([RankReport(0, Ending.STOPPED), RankReport(1, Ending.ABSENT, "did not come")], 1),
        ([raised(0, "RankFailed: rank 1 of 2 did not come to the run"), RankReport(1, Ending.SKIPPED, at_s=9.0)], 1),
        ([raised(0, "RankFailed: rank 2 raised\nrank 1: Connection closed", at_s=1.0), raised(1, at_s=2.0)], 0),
    ],
)
def test_the_culprit_is_the_first_cause(reports: list[RankReport], culprit: int) -> None:
    assert culprit_of(reports) == culprit


def test_the_story_has_the_culprit_first_and_echoes_last() -> None:
    reports = [
        raised(0, GLOO),
        RankReport(1, Ending.STOPPED, waiting="1RECV_F0 from rank 0", traceback="a stack\n"),
        raised(2, at_s=5.0),
        RankReport(3, Ending.FINISHED),
        raised(4, "KeyError: 'x'\nmore", at_s=6.0),
    ]
    golden(describe(reports), exact=True)


def test_every_rank_that_is_stuck_shows_where() -> None:
    stuck = [RankReport(rank, Ending.STUCK, "did not finish within 5 s", f"stack {rank}\n") for rank in range(2)]
    golden(describe(stuck), exact=True)


def test_what_all_ranks_raise_is_told_once() -> None:
    golden(describe([raised(0), raised(1)]))
    golden(describe([raised(0)]))


def test_the_errors_survive_a_pickle() -> None:
    failed = pickle.loads(pickle.dumps(RankFailed([FINISHED, raised(1)], ValueError("bad split"))))
    assert (failed.culprit, failed.reports[0], str(failed.cause)) == (1, FINISHED, "bad split")
    wanting = pickle.loads(pickle.dumps(NeedsMoreRanks(4, 2)))
    assert (wanting.needed, wanting.available) == (4, 2)
    golden(str(wanting))


def stuck(rank: int, waiting: str, *peers: int) -> RankReport:
    return RankReport(rank, Ending.STUCK, "did not finish within 5 s", f"stack {rank}\n", waiting, peers=peers)


def test_ranks_that_wait_in_each_others_sends_come_before_those_that_wait_for_them() -> None:
    victims = [stuck(0, "a message from rank 1", 1), stuck(3, "a message from rank 2", 2)]
    crossed = [stuck(1, "a send to rank 2", 2), stuck(2, "a send to rank 1", 1)]
    reports = [victims[0], *crossed, victims[1]]
    assert culprit_of(reports) == 1
    golden(headline(reports))
    lines = describe(reports).splitlines()
    assert lines[0] == headline(reports)
    assert [line[:6] for line in lines if line.startswith("rank ")] == ["rank 1", "rank 2", "rank 0", "rank 3"]
    assert "    stack 0" in lines


def at_barrier(rank: int) -> RankReport:
    return stuck(rank, "torch.distributed.barrier")


def ended(rank: int) -> RankReport:
    return RankReport(rank, Ending.FINISHED)


SOME = "torch.distributed.all_reduce of the group of ranks"
ANY = "a message from any rank"
RING = [stuck(0, "a message from rank 1 or a send to rank 2", 1, 2), stuck(1, "a send to rank 0", 0)]
BLOCKED: dict[str, tuple[list[RankReport], int]] = {
    "returned early": (
        [stuck(0, "a message from rank 1", 1), ended(1), stuck(2, "a message from rank 0", 0)],
        1,
    ),
    "returned before a collective": ([at_barrier(0), ended(1), at_barrier(2)], 1),
    "elsewhere than at a collective": ([at_barrier(0), stuck(1, "a message from rank 2", 2), at_barrier(2)], 1),
    "all at a collective": ([at_barrier(0), at_barrier(1)], 0),
    # Ranks of a group wait for those of it alone that do not stand in the same call.
    "groups": (
        [
            stuck(0, f"{SOME} 0, 1", 1),
            ended(1),
            stuck(2, f"{SOME} 2, 3, 4", 3, 4),
            ended(3),
            stuck(4, f"{SOME} 2, 3, 4", 2, 3),
        ],
        1,
    ),
    "any message": ([stuck(0, ANY, 1), stuck(1, ANY, 0)], 0),
    "one of several": ([*RING, stuck(2, "a send to rank 0", 0)], 0),
    "what all lead to": ([*RING, ended(2)], 2),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_those_that_others_wait_for_come_first(name: str) -> None:
    reports, culprit = BLOCKED[name]
    assert culprit_of(reports) == culprit
    golden(headline(reports), exact=True)


def test_where_a_rank_failed_or_computes_nobody_is_blamed_for_waiting() -> None:
    waits = stuck(0, "a message from rank 1", 1)
    for other in (raised(1), RankReport(1, Ending.DIED, "exited with status 3"), RankReport(1, Ending.STUCK, "stuck")):
        assert culprit_of([waits, other]) == 1
        assert headline([waits, other]).startswith("rank 1 ")
    alone = RankReport(0, Ending.STUCK, "stuck", waiting="1RECV_F0 with rank 1")
    assert headline([alone, FINISHED]).startswith("rank 0")


@pytest.mark.parametrize(
    ("waits", "circles"),
    [
        ({0: [1], 1: [2], 2: [1], 3: [2]}, [(1, 2)]),  # and rank 3 waits for it
        ({0: [1], 2: [0]}, [(1,)]),  # which waits for nobody
        ({0: [1, 2], 1: [0], 2: [0]}, [(0, 1, 2)]),  # whichever message it is
        ({0: [1, 2], 1: [0]}, [(2,)]),
        ({0: [1], 1: [0], 2: [3], 3: [2]}, [(0, 1), (2, 3)]),
    ],
)
def test_circles_are_what_all_waits_lead_to(waits: dict[int, list[int]], circles: list[tuple[int, ...]]) -> None:
    assert find_circles(waits) == circles


def test_a_hang_says_once_how_far_each_rank_had_come() -> None:
    first, second = stuck(0, "a message from rank 1", 1), stuck(1, "a message from rank 0", 0)
    reports = [replace(first, progress="sent 2 of 4"), replace(second, progress="sent 1 of 4")]
    golden(headline(reports))
    assert describe(reports) == f"{headline(reports)}\n{details(reports)}"
    assert "sent" not in details(reports)


def test_what_the_headline_says_is_not_among_the_details() -> None:
    golden(details([FINISHED, raised(1)]))
    golden(details([raised(0), raised(1)]))


def test_a_hang_is_told_from_a_crash() -> None:
    late = raised(0, "TransportTimeout: rank 0 waited 2 s at 0RECV_B0 with rank 1, which did not come")
    left = [stuck(0, "a message from rank 1", 1), RankReport(1, Ending.FINISHED)]
    failures = map(RankFailed, ([RankReport(0, Ending.STUCK)], left, [late], [raised(0)]))
    assert [failure.hang for failure in failures] == [True, True, True, False]
