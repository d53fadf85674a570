"""The simulator against closed forms, and against a longest path computed another way.

tests/quality/test_families.py has the numbers of the literature. Unless said otherwise T_F = T_I = T_W = 1 and T_B = 2.
"""

import time
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.dataflow import Stuck
from pipeproof.pipeline.schedule import Schedule, schedule_from_csv
from pipeproof.pipeline.schedules import FAMILIES, LOOPED, SPLIT, build
from pipeproof.pipeline.timeline import Durations, Times, simulate

ZB_H1 = build("zb-h1", ranks=4, microbatches=8)


def lasting(forward: float, backward: float) -> Durations:
    """T_F and T_B, the same on every stage."""
    return lambda action: forward if action.kind is Kind.FORWARD else backward


@pytest.mark.long
def test_bubble_of_interleaved_in_closed_form() -> None:
    """For every M >= P, whether P divides M or not. A sample of M, with all remainders, over P <= 8, V <= 4."""
    for ranks, virtual in product(range(1, 9), range(1, 5)):
        for microbatches in {*range(ranks, 2 * ranks + 1), 3 * ranks - 1, 32}:
            timeline = simulate(build("interleaved", ranks=ranks, virtual=virtual, microbatches=microbatches))
            assert timeline.bubble_fraction == (ranks - 1) / (virtual * microbatches + ranks - 1)
            assert timeline.makespan == 3 * (virtual * microbatches + ranks - 1)


times = st.integers(1, 50).map(lambda quarters: quarters / 4)  # exact in floating point


@pytest.mark.long
@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 9), forward=times, backward=times)
def test_bubbles_in_closed_form_for_any_times(ranks: int, microbatches: int, forward: float, backward: float) -> None:
    def bubble(name: str) -> float:
        return simulate(build(name, ranks=ranks, microbatches=microbatches), lasting(forward, backward)).global_bubble

    one = (ranks - 1) * (forward + backward)
    assert bubble("gpipe") == one
    assert bubble("1f1b") == one
    assert bubble("naive") == one * microbatches


@given(
    name=st.sampled_from(sorted(set(FAMILIES) - SPLIT)),
    ranks=st.integers(1, 6),
    virtual=st.integers(1, 3),
    microbatches=st.integers(1, 9),
    forward=times,
    backward=times,
    latency=times,
)
def test_the_global_bubble_is_never_below_the_fill(
    name: str, ranks: int, virtual: int, microbatches: int, forward: float, backward: float, latency: float
) -> None:
    """G >= (P-1) T_F: the last rank cannot start earlier."""
    schedule = build(name, ranks=ranks, microbatches=microbatches, virtual=virtual if name in LOOPED else 1)
    timeline = simulate(schedule, lasting(forward, backward), latency=latency)
    assert timeline.global_bubble >= (ranks - 1) * (forward + latency)
    assert timeline.global_bubble >= 0 <= timeline.local_bubble <= timeline.makespan - min(timeline.busy)


def test_nothing_to_do_takes_no_time() -> None:
    timeline = simulate(Schedule("nothing", 0, (0,), ((),)))
    assert (timeline.makespan, timeline.global_bubble, timeline.local_bubble, timeline.bubble_fraction) == (0, 0, 0, 0)


def test_latency_is_paid_between_ranks_only() -> None:
    across = simulate(schedule_from_csv("0F0,0B0\n1F0,1B0"), latency=0.5)
    assert [*across.starts] == [(0, 5), (1.5, 2.5)]
    assert [*across.ends] == [(1, 7), (2.5, 4.5)]
    within = simulate(schedule_from_csv("0F0,1F0,1B0,0B0"), latency=0.5)
    assert within.makespan == 6


def test_latency_by_edge() -> None:
    """Rank 0 to rank 1 takes 2, the way back 0.25: as a mapping and as a function."""
    schedule = schedule_from_csv("0F0,0B0\n1F0,1B0")
    by_edge = {(0, 1): 2.0, (1, 0): 0.25}
    for latency in (by_edge, lambda sender, receiver: by_edge[sender, receiver]):
        assert [*simulate(schedule, latency=latency).starts] == [(0, 6.25), (3, 4)]


def test_times_are_durations_too() -> None:
    """The same function of an action, computed for all actions at once."""
    times = Times(1, 1.25, 0.5, stages=(1, 2, 3, 4))
    at_once = simulate(ZB_H1, times)
    assert at_once == simulate(ZB_H1, lambda action: times(action))
    assert times(Action(2, Kind.BACKWARD, 0)) == 3 * 1.75


def test_the_critical_path_has_no_slack() -> None:
    timeline = simulate(build("1f1b", ranks=3, microbatches=4), latency=0.5)
    spans = [(timeline.starts[rank][slot], timeline.ends[rank][slot]) for rank, slot in timeline.critical_path]
    assert spans[0][0] == 0
    assert spans[-1][1] == timeline.makespan
    gaps = [later[0] - earlier[1] for earlier, later in pairwise(spans)]
    hops = [one[0] != other[0] for one, other in pairwise(timeline.critical_path)]
    assert gaps == [0.5 * hop for hop in hops]


# Rank 1 runs 1F1 and 1B0 as one.
TOGETHER = replace(schedule_from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1"), overlaps=((1, 1),))


def test_what_overlaps_starts_and_ends_as_one() -> None:
    timeline = simulate(TOGETHER)
    assert [*timeline.starts] == [(0, 1, 5, 7), (1, 2, 3, 5)]


def test_what_overlaps_hands_on_at_its_end_only() -> None:
    apart = schedule_from_csv("0F0,1F0,0F1,1B0,1F1,1B1,0B0,0B1")
    chain = schedule_from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n2F0,2B0,2F1,2B1")
    assert simulate(chain).starts[2] == (2, 3, 5, 6)
    assert simulate(replace(chain, overlaps=((1, 1),))).starts[2] == (2, 3, 8, 9), "1F1 waits for what 1B0 needs"
    assert (simulate(apart).messages, simulate(chain).messages) == (0, 8)


def test_time_of_each_stage_counts() -> None:
    """A heavy last stage: the other rank waits, and the busiest rank sets the bound."""
    timeline = simulate(build("gpipe", ranks=2, microbatches=2), lambda action: 10.0 if action.stage else 1.0)
    assert [*timeline.starts] == [(0, 1, 31, 41), (1, 11, 21, 31)]
    assert [*timeline.busy] == [4, 40]
    assert (timeline.makespan, timeline.global_bubble) == (42, 2)
    assert timeline.local_bubble == 42 - 4


def longest_path(schedule: Schedule, durations: Durations, latency: float) -> dict[Action, float]:
    """Every action's end, by relaxing 'after the one before' and 'after what it needs' until nothing moves."""
    before = {b: a for row in schedule.ranks for a, b in pairwise(row)}
    ends: dict[Action, float] = {action: 0.0 for row in schedule.ranks for action in row}
    last = schedule.n_stages - 1

    def earliest(action: Action) -> float:
        stage, kind, m = action
        start = ends[before[action]] if action in before else 0.0
        source = stage - 1 if kind is Kind.FORWARD else stage + 1
        if 0 <= source <= last:
            delay = latency * (schedule.placement[source] != schedule.placement[stage])
            start = max(start, ends[Action(source, kind, m)] + delay)
        return start + durations(action)

    while (relaxed := {action: earliest(action) for action in ends}) != ends:
        ends = relaxed
    return ends


@given(
    name=st.sampled_from(["naive", "1f1b", "interleaved"]),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 4),
    speeds=st.lists(times, min_size=8, max_size=8),
    latency=times,
)
def test_ends_are_longest_paths(name: str, ranks: int, microbatches: int, speeds: list[float], latency: float) -> None:
    schedule = build(name, ranks=ranks, microbatches=microbatches, virtual=2 if name == "interleaved" else 1)

    def duration(action: Action) -> float:
        return speeds[action.stage] * (1 + (action.kind is Kind.BACKWARD)) + action.microbatch / 8

    timeline = simulate(schedule, duration, latency=latency)
    ends = longest_path(schedule, duration, latency)
    assert timeline.ends == tuple(tuple(ends[action] for action in row) for row in schedule.ranks)
    assert timeline.starts == tuple(tuple(ends[action] - duration(action) for action in row) for row in schedule.ranks)
    assert timeline.makespan == max(ends.values())


def test_a_schedule_that_contradicts_itself_is_stuck() -> None:
    with pytest.raises(Stuck, match=r"rank 0 waits at 0B0 for stage 1's input gradient of microbatch 0; rank 1 waits"):
        simulate(schedule_from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"))


@pytest.mark.long
def test_the_cost_does_not_grow_with_the_square() -> None:
    """100 000 actions take half a second; with any inner loop over the others they would take many minutes."""
    schedule = build("1f1b", ranks=8, microbatches=6_250)
    began = time.process_time()
    assert simulate(schedule).makespan == 3 * (6_250 + 7)
    assert time.process_time() - began < 30
