"""Plans: every family once, those that fit first, figures that are the simulator's, and the trade in words."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.pipeline.partition import costs_of
from pipeproof.pipeline.plan import Needs, plan, row, trade
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import FAMILIES, build
from pipeproof.pipeline.timeline import simulate
from tests.support.golden import golden


def test_every_family_is_there_and_the_fastest_comes_first() -> None:
    options = plan(Needs(4, 16))
    assert {option.name for option in options} == set(FAMILIES)
    assert not any(option.fails for option in options)
    times = [option.makespan for option in options]
    assert times == sorted(times)


def test_figures_are_those_of_the_simulator_per_average_rank() -> None:
    found = {option.label: option for option in plan(Needs(4, 16))}
    for label, virtual in (("1f1b", 1), ("interleaved V=2", 2), ("zb-v", 2)):
        timeline = simulate(build(found[label].name, ranks=4, microbatches=16, virtual=virtual))
        assert found[label].makespan == timeline.makespan / virtual
        assert found[label].global_bubble == timeline.global_bubble / virtual
        assert found[label].peaks == tuple(peak / virtual for peak in timeline.peaks)
        assert found[label].messages == timeline.messages
    assert found["1f1b"].percent == pytest.approx(100 * 3 / 19)


def test_what_does_not_fit_comes_last_and_says_why() -> None:
    options = plan(Needs(8, 12, memory=4.0))
    fails = {option.label: option.fails for option in options if option.fails}
    golden(fails["gpipe"])
    golden(fails["dualpipev"])
    assert [bool(option.fails) for option in options] == sorted(bool(option.fails) for option in options)
    assert {option.label for option in options if not option.fails} == {"v-min", "naive"}
    golden("\n".join(row(option)[-1] for option in options))


def test_the_trade_is_named() -> None:
    golden(trade(plan(Needs(4, 16))))
    golden(trade(plan(Needs(8, 12, memory=0.5))))
    golden(trade(plan(Needs(1, 4, memory=1.0))))


def test_layers_are_balanced_over_the_stages_and_their_times_used() -> None:
    options = {option.label: option for option in plan(Needs(2, 4, layers=(4, 1, 1, 1, 1, 4)))}
    assert options["1f1b"].split == (3, 3)
    assert options["zb-v"].split == (1, 2, 2, 1)
    assert options["1f1b"].makespan == simulate(build("1f1b", ranks=2, microbatches=4)).makespan
    golden(options["interleaved V=4"].fails)
    assert "1,2,2,1" in {row(option)[-2] for option in options.values()}


def test_an_uneven_model_costs_time() -> None:
    even, uneven = (
        next(option for option in plan(Needs(2, 8, layers=layers)) if option.label == "1f1b")
        for layers in ((1, 1), (1, 3))
    )
    assert uneven.makespan > even.makespan


@pytest.mark.long
@given(
    activations=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    weights=st.lists(st.integers(0, 20), min_size=6, max_size=6),
    memory=st.integers(20, 120),
)
def test_the_split_is_the_most_even_one_that_the_device_can_hold(
    activations: list[int], weights: list[int], memory: int
) -> None:
    """1F1B on three ranks, against every split: rank r holds 3 - r activations of its layers, and their weights."""
    needs = Needs(3, 8, float(memory), activations=tuple(activations), weights=tuple(weights))
    found = next(option for option in plan(needs) if option.label == "1f1b")

    def peaks(split: tuple[int, ...]) -> list[int]:
        held, kept = costs_of(split, activations), costs_of(split, weights)
        return [int((3 - rank) * held[rank] + kept[rank]) for rank in range(3)]

    every = [(a, b, 6 - a - b) for a in range(1, 5) for b in range(1, 6 - a)]
    fitting = [split for split in every if max(peaks(split)) <= memory]
    assert bool(found.fails) == (not fitting)
    assert [int(peak) for peak in found.peaks] == peaks(found.split)
    if fitting:
        assert max(found.split) == min(map(max, fitting))


def test_a_rank_with_two_stages_shares_its_memory_out() -> None:
    """What is found fits, and is not the split that balances where that does not fit."""
    sizes = (9.0, 1, 1, 1, 1, 1, 1, 9)
    free, tight = (
        next(option for option in plan(Needs(2, 8, memory, activations=sizes)) if option.label == "zb-v")
        for memory in (None, 38.0)
    )
    assert free.split == (2, 2, 2, 2)
    assert max(free.peaks) > 38 >= max(tight.peaks)
    assert tight.split != free.split
    assert not tight.fails


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        (Needs(2, 4, layers=(1, 1), activations=(1,)), "activations has 1 numbers: expected 2, one for every layer"),
        (Needs(2, 4, activations=(1, 1), weights=(1, 1, 1)), "weights has 3 numbers: expected 2"),
        (Needs(2, 4, weights=(1, 1)), "weights without activations: give both, in one unit"),
        (Needs(2, 4, activations=(1, 0)), "activations is 0: expected a number above 0"),
        (Needs(2, 4, activations=(1, 1), weights=(-1, 0)), "weights is -1: expected a number of at least 0"),
        (Needs(0, 4), "ranks is 0"),
        (Needs(4, 0), "microbatches is 0"),
        (Needs(4097, 4), "ranks is 4097"),
        (Needs(4, 4, memory=0.0), "memory is 0"),
        (Needs(4, 4, memory=math.nan), "memory is nan"),
        (Needs(4, 4, times=(1, 0, 1)), "is 0"),
        (Needs(2, 2, layers=(-1,)), "is -1"),
        (Needs(4, 4, weight_memory=-1.0), "is -1"),
        (Needs(4, 4, layers=(math.inf,)), "is inf"),
    ],
)
def test_needs_that_cannot_be_are_refused(needs: Needs, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        plan(needs)
