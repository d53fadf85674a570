"""Which message was lost, from what ranks waited for."""

from pipeproof.pipeline import build
from pipeproof.pipeline.action import Action
from pipeproof.pipeline.program import lower
from pipeproof.worlds.rank_report import Ending, RankReport, headline
from pipeproof.worlds.stall import find_lost_message, waiting_in
from tests.support.golden import golden

PROGRAM = lower(build("1f1b", ranks=2, virtual=1, microbatches=2))


def waited(rank: int, action: str, peer: int) -> RankReport:
    return RankReport(
        rank, Ending.RAISED, f"TransportTimeout: rank {rank} waited 2 s at {action} with rank {peer}, which"
    )


def test_a_message_whose_sender_went_on_was_lost() -> None:
    found = find_lost_message(PROGRAM, [waited(0, "0RECV_B0", 1), waited(1, "1RECV_F0", 0)])
    assert (found.rank, found.receive, found.sender) == (1, Action.parse("1RECV_F0"), 0)
    golden(str(found))


def test_a_sender_that_had_not_come_to_it_lost_nothing() -> None:
    assert (
        find_lost_message(PROGRAM, [waited(0, "0RECV_B0", 1), RankReport(1, Ending.STUCK, "had not finished")]) is None
    )
    assert find_lost_message(PROGRAM, [waited(1, "1RECV_F1", 0), RankReport(0, Ending.DIED)]) is None


def test_what_a_stopped_rank_said_counts_too() -> None:
    stopped = RankReport(0, Ending.STOPPED, waiting="0RECV_B1 with rank 1")
    found = find_lost_message(PROGRAM, [stopped, waited(1, "1RECV_F1", 0)])
    assert found.send == Action.parse("0SEND_F1")


def test_a_rank_that_waits_has_sent_what_comes_before() -> None:
    reports = [waited(0, "0RECV_B0", 1), waited(1, "1RECV_F1", 0), RankReport(2, Ending.FINISHED)]
    told = waiting_in(PROGRAM, reports)
    golden("\n".join(one.progress for one in told))
    golden(headline(told[:2]))
    assert waiting_in(PROGRAM, reports[2:]) == reports[2:], "a rank of another replica"
