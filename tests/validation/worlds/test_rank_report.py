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


def test_a_rank_that_returned_early_comes_before_those_that_wait_for_it() -> None:
    reports = [
        stuck(0, "a message from rank 1", 1),
        RankReport(1, Ending.FINISHED),
        stuck(2, "a message from rank 0", 0),
    ]
    assert culprit_of(reports) == 1
    golden(headline(reports))


def test_a_rank_that_did_not_come_to_a_collective_is_the_one_that_is_waited_for() -> None:
    at_barrier = [stuck(rank, "torch.distributed.barrier") for rank in (0, 2)]
    assert culprit_of([at_barrier[0], RankReport(1, Ending.FINISHED), at_barrier[1]]) == 1
    crossed = [at_barrier[0], stuck(1, "a message from rank 2", 2), at_barrier[1]]
    golden(headline(crossed))
    everybody = [stuck(rank, "torch.distributed.barrier") for rank in range(2)]
    golden(headline(everybody), exact=True)


def test_groups_that_wait_for_others_are_told_each_for_itself() -> None:
    """Ranks of a group wait for those of it alone that do not stand in the same call."""
    call = "torch.distributed.all_reduce of the group of ranks"
    waits = [stuck(0, f"{call} 0, 1", 1), stuck(2, f"{call} 2, 3, 4", 3, 4), stuck(4, f"{call} 2, 3, 4", 2, 3)]
    ended = [RankReport(rank, Ending.FINISHED) for rank in (1, 3)]
    reports = sorted([*waits, *ended], key=lambda report: report.rank)
    assert culprit_of(reports) == 1
    golden(headline(reports))


def test_ranks_that_wait_for_any_message_wait_for_each_other() -> None:
    reports = [stuck(0, "a message from any rank", 1), stuck(1, "a message from any rank", 0)]
    golden(headline(reports))


def test_messages_of_which_any_may_be_awaited_blame_only_what_all_lead_to() -> None:
    ring = [stuck(0, "a message from rank 1 or a send to rank 2", 1, 2), stuck(1, "a send to rank 0", 0)]
    golden(headline([*ring, stuck(2, "a send to rank 0", 0)]))
    assert culprit_of([*ring, RankReport(2, Ending.FINISHED)]) == 2


def test_where_a_rank_failed_or_computes_nobody_is_blamed_for_waiting() -> None:
    waits = stuck(0, "a message from rank 1", 1)
    for other in (raised(1), RankReport(1, Ending.DIED, "exited with status 3"), RankReport(1, Ending.STUCK, "stuck")):
        assert culprit_of([waits, other]) == 1
        assert headline([waits, other]).startswith("rank 1 ")
    alone = RankReport(0, Ending.STUCK, "stuck", waiting="1RECV_F0 with rank 1")
    assert headline([alone, FINISHED]).startswith("rank 0")


def test_a_circle_and_what_waits_for_it() -> None:
    assert find_circles({0: [1], 1: [2], 2: [1], 3: [2]}) == [(1, 2)]


def test_one_that_waits_for_nobody() -> None:
    assert find_circles({0: [1], 2: [0]}) == [(1,)]


def test_whichever_message_it_is() -> None:
    assert find_circles({0: [1, 2], 1: [0], 2: [0]}) == [(0, 1, 2)]
    assert find_circles({0: [1, 2], 1: [0]}) == [(2,)]


def test_several_circles() -> None:
    assert find_circles({0: [1], 1: [0], 2: [3], 3: [2]}) == [(0, 1), (2, 3)]


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
