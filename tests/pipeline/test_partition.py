"""Cutting layers into stages."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.pipeline.partition import balance, by_sizes, costs_of, even, parse_split
from pipeproof.pipeline.schedule import ScheduleError


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"), [(8, 4, (2, 2, 2, 2)), (7, 3, (3, 2, 2)), (4, 4, (1, 1, 1, 1)), (5, 1, (5,))]
)
def test_even(layers: int, stages: int, sizes: tuple[int, ...]) -> None:
    assert even(layers, stages) == sizes == parse_split("even", layers=layers, stages=stages)


@given(st.integers(1, 40).flatmap(lambda layers: st.tuples(st.just(layers), st.integers(1, layers))))
def test_even_uses_every_layer_once(counts: tuple[int, int]) -> None:
    layers, stages = counts
    sizes = even(layers, stages)
    assert (len(sizes), sum(sizes)) == (stages, layers)
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    assert by_sizes(layers, stages, sizes) == sizes


costs = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(costs, st.integers(1, 4))
def test_balanced_is_the_best_of_all_splits(layers: list[int], stages: int) -> None:
    if stages > len(layers):
        with pytest.raises(ScheduleError, match="cannot fill"):
            balance(layers, stages)
        return
    every = [
        tuple(b - a for a, b in pairwise((0, *cuts, len(layers))))
        for cuts in combinations(range(1, len(layers)), stages - 1)
    ]
    found = balance(layers, stages)
    assert found in every
    assert max(costs_of(found, layers)) == min(max(costs_of(sizes, layers)) for sizes in every)


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [([1, 1, 1, 1], 2, (2, 2)), ([9, 1, 1, 1], 2, (1, 3)), ([1, 2, 3, 4, 5], 3, (3, 1, 1)), ([2.5], 1, (1,))],
)
def test_balanced_by_hand(layers: list[float], stages: int, sizes: tuple[int, ...]) -> None:
    assert balance(layers, stages) == sizes


@pytest.mark.parametrize(
    ("text", "sizes"), [("3,1,2,2", (3, 1, 2, 2)), (" 3, 1 ,2,2 ", (3, 1, 2, 2)), (" Even ", (2, 2, 2, 2))]
)
def test_a_split_as_text(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_split(text, layers=8, stages=4) == sizes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("3,5", "split 3,5 has 2 sizes: expected 4, one per stage (ranks x virtual)"),
        ("3,1,2,3", "split 3,1,2,3 sums to 9: the model has 8 layers"),
        ("3,0,3,2", "split 3,0,3,2 leaves stage 1 with 0 layers: every stage needs at least 1"),
        ("5,-1,2,2", "split 5,-1,2,2 leaves stage 1 with -1 layers: every stage needs at least 1"),
        ("odd", "split 'odd' is neither 'even' nor sizes such as 3,1,2,2"),
        ("3,,5", "split '3,,5' is neither 'even' nor sizes such as 3,1,2,2"),
        ("", "split '' is neither 'even' nor sizes such as 3,1,2,2"),
        ("2.5,5.5", "split '2.5,5.5' is neither 'even' nor sizes such as 3,1,2,2"),
    ],
)
def test_a_split_that_does_not_fit_says_why(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_split(text, layers=8, stages=4)
    assert str(caught.value) == reason


@pytest.mark.parametrize(("layers", "stages"), [(3, 4), (3, 0), (3, -1)])
def test_even_needs_a_layer_per_stage(layers: int, stages: int) -> None:
    with pytest.raises(ScheduleError) as caught:
        even(layers, stages)
    assert str(caught.value).startswith(f"{layers} layers cannot fill {stages} stages: use ")


def test_a_model_has_layers_and_not_too_many() -> None:
    for layers in (0, 4097):
        with pytest.raises(ScheduleError, match=f"layers is {layers}: expected at "):
            even(layers, 1)
