"""Stages come in the model's order: by what only they hold, by their turn, and by what passed between them."""

import pytest
import torch

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.sketch import Sketch, sketch
from pipeproof.whitebox.rank import ModulePart
from pipeproof.whitebox.stages_in_order import Flow, PlacedStage, in_order

NAMES = ["a", "b", "c", "tied"]


def stage(rank: int, *held: str, chunk: int = 0) -> PlacedStage:
    return PlacedStage(rank, rank, ModulePart((), ()), dict(enumerate(held)), {}, chunk)


# Stages, the pairs of ranks of which one feeds the other, and the ranks in order.
CASES: dict[str, tuple[list[PlacedStage], set[tuple[int, int]], list[int]]] = {
    "by what they hold": ([stage(0, "c"), stage(1, "a"), stage(2, "b")], set(), [1, 2, 0]),
    "what others hold, too, says nothing": ([stage(0, "b", "tied"), stage(1, "a", "tied")], set(), [1, 0]),
    "all of it is held by others": ([stage(0, "a"), stage(1, "a", "b"), stage(2, "c")], set(), [0, 1, 2]),
    "nothing is held, and one feeds it": ([stage(0), stage(1, "a"), stage(2, "b")], {(1, 0)}, [1, 0, 2]),
    "nothing is held, and it feeds one": ([stage(0, "a"), stage(1), stage(2, "b")], {(1, 2)}, [0, 1, 2]),
    "nothing is held, and it feeds the first": ([stage(0, "a"), stage(1), stage(2, "b")], {(1, 0)}, [1, 0, 2]),
    "nothing is held or known": ([stage(0), stage(1, "a"), stage(2, "b")], set(), [1, 2, 0]),
}


@pytest.mark.parametrize("name", CASES)
def test_stages_have_an_order(name: str) -> None:
    stages, fed, ranks = CASES[name]
    found = in_order(stages, NAMES, lambda: ["tied"], lambda one, other: (one.rank, other.rank) in fed)
    assert [one.rank for one in found] == ranks
    assert [one.index for one in found] == [0, 1, 2][: len(found)]


def numbers(*seeds: int) -> list[Sketch]:
    return [sketch(torch.randn(4, generator=torch.Generator().manual_seed(seed))) for seed in seeds]


def flow(came: list[int], gave: list[int]) -> Flow:
    """A call for each: what came in, and what was put out."""
    return Flow.of([Call(True, inputs=numbers(x), outputs=numbers(y)) for x, y in zip(came, gave, strict=True)])


@pytest.mark.parametrize(
    ("one", "other", "feeds"),
    [
        (flow([0, 1], [2, 3]), flow([2, 3], [4, 5]), True),
        (flow([2, 3], [4, 5]), flow([0, 1], [2, 3]), False),
        (flow([0, 1, 2], [3, 4, 5]), flow([3, 8, 9], [6, 7, 10]), False),
        (flow([0, 1, 2], [3, 4, 5]), flow([3, 4, 9], [6, 7, 10]), True),
    ],
    ids=["all", "backwards", "one of three", "two of three"],
)
def test_most_of_what_passed_tells_who_feeds(one: Flow, other: Flow, feeds: bool) -> None:
    assert one.feeds(other) == feeds
