"""Gradients that ranks of a job hold in common: two replicas, of which each has a part of every gradient, or a copy."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import SingleDevice, World, check_step
from pipeproof.foreign import FlatShard
from pipeproof.judging.verdict import Verdict
from pipeproof.worlds.worker import RankContext
from tests.support.steps import pairs

WIDTH = 4
CUT = 6  # where the flat gradient of 16 elements is cut
loss_fn = nn.functional.mse_loss


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, bias=False)


def part_of(gradient: Tensor, rank: int, fault: str) -> FlatShard | Tensor | None:
    """What a rank has of a gradient."""
    flat = gradient.flatten()
    first, last = (CUT, 16) if rank else (0, CUT)
    if fault == "missing" and rank:
        return FlatShard(None)
    if fault == "overlapping" and rank:
        return FlatShard(flat[first - 1 :], first - 1)
    if fault == "outside" and rank:
        return FlatShard(flat[first:], first + 1)
    if fault == "not-reduced" and rank:
        return FlatShard(flat[first:] / 2, first)
    if fault == "unequal":
        return gradient * (1 + 1e-7 * rank)
    if fault == "copies" or (fault == "mixed" and rank):
        return gradient
    return FlatShard(flat[first:last], first)


def step(context: RankContext, fault: str) -> Verdict:
    """A step of two replicas."""
    rank, model = context.rank, build()
    data = pairs(4, width=WIDTH)[2 * rank : 2 * rank + 2]
    with check_step({0: model}, data, against=SingleDevice(build, loss_fn), timeout_s=20.0) as check:
        for inputs, target in data:
            (loss_fn(model(inputs), target) / 4).backward()
        gradient = model.get_parameter("weight").grad
        assert gradient is not None
        dist.all_reduce(gradient)
        check.gradients({} if fault == "silent" and rank else {"weight": part_of(gradient, rank, fault)})
        check.report(losses=[float(loss_fn(model(inputs), target)) for inputs, target in data])
    return check.verdict


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("fault", ["", "copies"])
def test_parts_are_put_together_and_copies_are_the_same(fault: str, world: World) -> None:
    for verdict in world.run(step, fault, ranks=2):
        assert verdict.verdict == "pass", str(verdict)
        assert verdict.law("gradient").checked == (2 if fault else 1)
        assert verdict.law("replicas").checked == 1
        assert [law.name for law in verdict.laws].count("shards") == (not fault)


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("missing", "parts [0:6], [0:0] of [16]: not all of it"),
        ("overlapping", "parts [0:6] and [5:16] overlap"),
        ("outside", "part [7:17] of [16]: it ends outside"),
    ],
)
def test_parts_that_make_up_no_whole_are_a_mismatch(fault: str, seen: str, world: World) -> None:
    for verdict in world.run(step, fault, ranks=2):
        assert verdict.verdict == "fail", str(verdict)
        assert [(one.law, one.parameter, one.seen) for one in verdict.mismatches] == [("shards", "weight", seen)]
        assert verdict.law("gradient").outcome == "unknown"


@pytest.mark.pipeproof_ranks
def test_a_part_that_is_another_is_a_wrong_gradient(world: World) -> None:
    for verdict in world.run(step, "not-reduced", ranks=2):
        assert verdict.verdict == "fail", str(verdict)
        assert verdict.law("shards").outcome == "pass"
        assert verdict.law("gradient").wrong == 1


@pytest.mark.pipeproof_ranks
def test_replicas_whose_gradients_differ_by_less_than_rounding_are_told(world: World) -> None:
    for verdict in world.run(step, "unequal", ranks=2):
        assert verdict.law("gradient").outcome == "pass", str(verdict)
        (told,) = verdict.mismatches
        assert (told.law, told.rank, told.seen) == ("replicas", 1, "another gradient than rank 0's")


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize(
    ("fault", "note"),
    [
        ("mixed", "rank 0 has a part, rank 1 has all: weight"),
        ("silent", "rank 0 has a part, rank 1 has nobody knows what: weight"),
    ],
)
def test_where_nobody_knows_what_goes_together_nothing_is_said(fault: str, note: str, world: World) -> None:
    for verdict in world.run(step, fault, ranks=2):
        assert verdict.verdict == "unknown", str(verdict)
        assert note in verdict.law("shards").note
