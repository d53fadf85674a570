"""Traces as values: where the time of a rank went, and the way through messages."""

import pytest

from pipeproof.pipeline import Action, Schedule
from pipeproof.pipeline.trace import Profile, Span, Trace, decode, encode


def spans(rank: int, text: str) -> tuple[Span, ...]:
    """``"0F0 1 3 0.5"`` is 0F0 from 1 to 3, half a unit of it waiting."""
    words = [part.split() for part in text.split(", ")]
    return tuple(Span(rank, Action.parse(name), *map(float, times)) for name, *times in words)


SCHEDULE = Schedule("own", 1, (0, 1), ((Action.parse("0F0"),), (Action.parse("1F0"),)))
TRACE = Trace(SCHEDULE, (spans(0, "0F0 5 7, 0SEND_F0 7 8"), spans(1, "1RECV_F0 5.5 6, 1F0 6 11 2")))


def test_a_span_works_after_it_has_waited() -> None:
    span = TRACE.by_action[Action.parse("1F0")]
    assert (span.worked_from, span.worked) == (8, 3)


def test_a_ranks_time_is_computing_messages_and_the_rest() -> None:
    assert TRACE.makespan == 6
    first, second = TRACE.profiles()
    assert (first.rank, first.compute_s, first.communication_s, first.idle_s) == (0, 2, 1, 3)
    assert (second.rank, second.compute_s, second.communication_s, second.idle_s) == (1, 3, 0.5, 2.5)
    assert first.other_s == second.other_s == 0


def test_a_trace_may_begin_at_zero() -> None:
    moved = TRACE.from_zero()
    assert (moved.began, moved.makespan) == (0, 6)
    earlier = spans(1, "1RECV_F0 0.5 1, 1F0 1 6 2")
    assert moved.spans[1] == earlier


def test_a_trace_of_nothing_lasts_no_time() -> None:
    assert Trace(SCHEDULE, ((), ())).from_zero().makespan == 0


def test_spans_travel_as_numbers() -> None:
    row = TRACE.spans[1]
    numbers = encode((span.action, span.began, span.ended, span.waited) for span in row)
    assert decode(1, numbers) == row
    assert decode(1, numbers, shift=10.0)[0] == row[0]._replace(began=15.5, ended=16)


def test_half_a_span_is_noticed() -> None:
    with pytest.raises(AssertionError, match="7 numbers are no whole spans"):
        decode(0, [0.0] * 7)


def test_other_is_what_is_left() -> None:
    assert abs(Profile(0, 1.0, 0.5, 0.2, 0.1).other_s - 0.2) < 1e-12
