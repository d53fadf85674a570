"""Sums of which the ranks of one replica have parts are told by their parts, and other faults are not."""

import pytest
import torch

from pipeproof.observers.sketch import sketch
from pipeproof.wings.composed.part_sums import Wrong, not_summed, of_other_ranks, sketched
from tests.support.golden import golden

WHOLE = torch.randn(16, generator=torch.Generator().manual_seed(0))
PART = torch.randn(16, generator=torch.Generator().manual_seed(1))


def wrong(seen: torch.Tensor, *names: str) -> Wrong:
    return sketched(1, names, dict.fromkeys(names, seen), dict.fromkeys(names, WHOLE))


def test_parts_that_add_up_to_what_is_due_are_not_reduced() -> None:
    (cause,) = not_summed([wrong(PART, "a", "b"), wrong(WHOLE - PART, "a", "b")], [0, 0])
    assert (cause.kind, cause.rank, cause.stage, cause.parameter) == ("not-reduced", 0, 1, None)
    golden(cause.detail)
    (cause,) = not_summed([wrong(PART, "a"), wrong(WHOLE - PART, "a"), {}, {}], [0, 0, 2, 2])
    assert cause.parameter == "a"


def test_replicas_whose_sum_or_mean_is_due_were_not_all_reduced() -> None:
    for times in (1, 2):
        (cause,) = not_summed([wrong(PART, "a"), wrong(times * WHOLE - PART, "a")], [0, 1])
        assert (cause.kind, cause.rank, cause.stage, cause.parameter) == ("not-reduced", 0, 1, "a")
        golden(cause.detail)
    assert not list(not_summed([wrong(WHOLE / 2, "a"), wrong(WHOLE / 2, "a")], [0, 1])), "that is a factor"


def test_what_adds_up_to_something_else_is_none() -> None:
    for replicas in ([0, 0], [0, 1]):
        assert not list(not_summed([wrong(PART, "a"), wrong(WHOLE - 1.01 * PART, "a")], replicas))
    assert not list(not_summed([wrong(PART, "a"), {}], [0, 0]))


def test_what_is_missing_is_not_looked_at() -> None:
    assert not sketched(1, ["a", "b"], {"a": None, "b": PART}, {"a": WHOLE, "b": None})


@pytest.mark.parametrize("over", [(0, 2), (0, 1, 2, 3), (0, 3), (0, 1, 3)])
def test_the_ranks_over_which_gradients_were_added_up_are_named(over: tuple[int, ...]) -> None:
    """Of two stages with two replicas each, rank 0 adds up over ``over`` and takes the mean."""
    draw = torch.Generator().manual_seed(2)
    own = [[torch.randn(16, generator=draw) for _ in "ab"] for _ in range(4)]
    alone = [{f"{rank // 2}.{k}": sketch(one) for k, one in enumerate(those)} for rank, those in enumerate(own)]
    seen = {f"0.{k}": torch.stack([own[rank][k] for rank in over]).sum(0) / len(over) for k in range(2)}
    due = {f"0.{k}": own[0][k] + own[1][k] for k in range(2)}
    seen_wrong = [sketched(0, due, seen, due), {}, {}, {}]
    (cause,) = of_other_ranks(seen_wrong, alone)
    assert (cause.kind, cause.ranks, cause.stages) == ("misplaced", (0,), (0,))
    assert cause.detail.endswith(f": over ranks {', '.join(map(str, over))} on rank 0")
    other = {**seen, "0.1": 1.05 * seen["0.1"]}
    assert not list(of_other_ranks([sketched(0, due, other, due), {}, {}, {}], alone)), "no one factor"
    right = {name: one / 2 for name, one in due.items()}
    assert not list(of_other_ranks([sketched(0, due, right, due), {}, {}, {}], alone)), "that is a factor"
