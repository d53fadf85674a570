"""Measured costs, and the simulation that they give."""

from dataclasses import replace

import pytest

from pipeproof.pipeline import Action, Kind, build, simulate
from pipeproof.pipeline.action import RECEIVES
from pipeproof.pipeline.costs import Costs, costs_of, predict, trace_of
from pipeproof.pipeline.schedules import FAMILIES, virtuals
from pipeproof.pipeline.trace import Span, Trace
from tests.pipeline.test_trace import spans

COSTS = Costs(
    {(stage, kind): 0.01 * (stage + 1) * (1 + 0.1 * k) for stage in range(8) for k, kind in enumerate(Kind)},
    {(one, other): 0.002 * (one + 1) for one in range(4) for other in range(4)},
)
EXACT = Costs({key: s for key, s in COSTS.work.items() if key[1] not in RECEIVES}, COSTS.latency)


def test_a_message_is_timed_by_those_who_waited_for_it() -> None:
    schedule = build("naive", ranks=2, microbatches=2)
    first = spans(0, "0F0 0 1, 0SEND_F0 1 2, 0B0 2 10 4.5, 0F1 10 11, 0SEND_F1 11 12, 0B1 12 20 7")
    # 1F0 waits for its message from the start, 1F1 comes when it has long been there.
    second = spans(1, "1F0 0 4 2.5, 1B0 4 5, 1SEND_B0 5 6, 1F1 13 15 0.1, 1B1 15 17, 1SEND_B1 17 18")
    costs = costs_of([Trace(schedule, (first, second))])
    assert costs.latency[0, 1] == pytest.approx(0.5)
    assert costs.latency[1, 0] == pytest.approx((0.5 + 1) / 2)
    assert costs.of(Action.parse("1F0")) == pytest.approx((1.5 + 1.9) / 2)  # their median, without the waits
    assert costs.of(Action.parse("1SEND_B1")) == 1
    assert costs.of(Action.parse("3F0")) == costs.of(None) == 0


def test_where_nobody_waited_the_shortest_way_is_taken() -> None:
    schedule = build("gpipe", ranks=2, microbatches=2)
    first = spans(0, "0F0 0 1, 0SEND_F0 1 2, 0F1 2 3, 0SEND_F1 3 4, 0B1 8 9, 0B0 9 10")
    second = spans(1, "1F0 4 5, 1F1 5 6, 1B1 6 7, 1SEND_B1 7 7.1, 1B0 7.1 8, 1SEND_B0 8 8.1")
    assert costs_of([Trace(schedule, (first, second))]).latency == pytest.approx({(0, 1): 1, (1, 0): 0.9})


def as_measured(trace: Trace) -> Trace:
    """A simulated trace with free receives as ranks would measure it: idling before an action is the action's wait."""

    def row(found: tuple[Span, ...]) -> tuple[Span, ...]:
        until, measured = 0.0, []
        for span in found:
            if span.action.kind not in RECEIVES:
                measured.append(span._replace(began=until, waited=span.began - until))
                until = span.ended
        return tuple(measured)

    return replace(trace, spans=tuple(map(row, trace.spans)))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "dualpipev"])
def test_what_the_simulator_predicts_is_what_it_would_measure(name: str) -> None:
    """Costs read off a step that follows them exactly are those costs, so the prediction is the step."""
    schedule = build(name, ranks=4, microbatches=8, virtual=virtuals(name, looped=2))
    measured = predict(schedule, EXACT)
    found = costs_of([as_measured(measured)])
    assert found.work == pytest.approx({key: EXACT.work[key] for key in found.work})
    assert all(found.latency[pair] >= EXACT.latency[pair] - 1e-9 for pair in found.latency)
    assert predict(schedule, found).makespan == pytest.approx(measured.makespan)


def test_one_slow_microbatch_does_not_move_the_prediction() -> None:
    schedule = build("1f1b", ranks=4, microbatches=8)
    quiet = as_measured(predict(schedule, EXACT))
    *most, last = quiet.spans[0]
    slow = replace(quiet, spans=((*most, last._replace(ended=last.ended + 1)), *quiet.spans[1:]))
    assert slow.makespan == pytest.approx(quiet.makespan + 1)
    assert predict(schedule, costs_of([slow])).makespan == pytest.approx(quiet.makespan)


def test_messages_take_time_of_both_ranks_and_on_their_way() -> None:
    schedule = build("naive", ranks=2, microbatches=1)
    work = {(0, Kind.FORWARD): 1.0, (0, Kind.SEND_F): 2.0, (1, Kind.RECV_F): 4.0, (1, Kind.FORWARD): 8.0}
    trace = predict(schedule, Costs(work, {(0, 1): 16.0}))
    assert trace.by_action[Action.parse("0SEND_F0")][2:4] == (1, 3)
    assert trace.by_action[Action.parse("1RECV_F0")][2:4] == (19, 23)
    assert trace.by_action[Action.parse("1F0")][2:4] == (23, 31)


def test_a_simulation_is_a_trace_in_its_own_units() -> None:
    timeline = simulate(build("zb-h1", ranks=4, microbatches=8))
    trace = trace_of(timeline)
    assert not trace.in_seconds
    assert trace.makespan == timeline.makespan
    assert [profile.compute_s for profile in trace.profiles()] == list(timeline.busy)
