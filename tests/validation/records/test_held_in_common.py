"""Gradients that ranks of a job hold in common: two replicas, of which each has a part of every gradient, or a copy."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import Contract, SingleDevice, StageByStage, World, check_step
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import FlatShard
from pipeproof.worlds.worker import RankContext
from tests.support.golden import golden
from tests.support.steps import backward, loss_fn, pairs

WIDTH = 4
CUT = 6  # where the flat gradient of 16 elements is cut


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, bias=False)


def part_of(gradient: Tensor, rank: int, fault: str) -> Any:
    """What a rank has of a gradient."""
    flat = gradient.flatten()
    first, last = (CUT, 16) if rank else (0, CUT)
    if fault == "missing" and rank:
        return FlatShard(None)
    if fault == "not-reduced" and rank:
        return FlatShard(flat[first:] / 2, first)
    if fault == "unequal":
        return gradient * (1 + 1e-7 * rank)
    if fault == "by index":
        return gradient[:2], slice(0, 2)
    if fault == "copies" or (fault == "mixed" and rank):
        return gradient
    return FlatShard(flat[first:last], first)


def step(context: RankContext, fault: str) -> Verdict:
    """A step of two replicas."""
    rank, model = context.rank, build()
    data = pairs(4, width=WIDTH)[2 * rank : 2 * rank + 2]
    with check_step({0: model}, data, against=SingleDevice(build, loss_fn), timeout_s=20.0) as check:
        losses = backward(model, data, divisor=4)
        gradient = model.get_parameter("weight").grad
        assert gradient is not None
        dist.all_reduce(gradient)
        check.gradients({} if fault in ("silent", "by index") and rank else {"weight": part_of(gradient, rank, fault)})
        check.report(losses=losses)
    return check.verdict


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("fault", ["", "copies"])
def test_parts_are_put_together_and_copies_are_the_same(fault: str, world: World) -> None:
    for verdict in world.run(step, fault, ranks=2):
        assert verdict.outcome == "pass", str(verdict)
        assert verdict.law("gradient").checked == (2 if fault else 1)
        assert verdict.law("replicas").checked == 1
        assert [law.name for law in verdict.laws].count("shards") == (not fault)


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("fault", ["missing", "silent"])
def test_parts_that_make_up_no_whole_are_a_mismatch(fault: str, world: World) -> None:
    observed = "parts [0:6], [0:0] of [16]: not all of it"
    for verdict in world.run(step, fault, ranks=2):
        assert verdict.outcome == "fail", str(verdict)
        assert [(one.law, one.parameter, one.observed_text) for one in verdict.mismatches] == [
            ("shards", "weight", observed)
        ]
        assert verdict.law("gradient").outcome == "unknown"


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_a_part_that_is_another_is_a_wrong_gradient(world: World) -> None:
    for verdict in world.run(step, "not-reduced", ranks=2):
        assert verdict.outcome == "fail", str(verdict)
        assert verdict.law("shards").outcome == "pass"
        assert verdict.law("gradient").wrong == 1


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_replicas_whose_gradients_differ_by_less_than_rounding_are_told(world: World) -> None:
    for verdict in world.run(step, "unequal", ranks=2):
        assert verdict.law("gradient").outcome == "pass", str(verdict)
        (told,) = verdict.mismatches
        assert (told.law, told.rank) == ("replicas", 1)
        golden(told.observed_text)


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize(
    ("fault", "note"),
    [
        ("mixed", "rank 0 has a part, rank 1 has all: weight"),
        ("by index", "rank 0 has a part, rank 1 has an unknown part: weight"),
    ],
)
def test_where_nobody_knows_what_goes_together_nothing_is_said(fault: str, note: str, world: World) -> None:
    for verdict in world.run(step, fault, ranks=2):
        assert verdict.outcome == "unknown", str(verdict)
        assert note in verdict.law("shards").note


def deep() -> nn.Module:
    """Parameters of 16, 16 and 4 elements, and one that is not trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].bias.requires_grad_(False)
    return model


def bucketed(context: RankContext, composed: bool, cut: int, fault: str) -> Verdict:
    """Two replicas, of whose flat gradients each has what lies on its side of ``cut``, and says nothing of the rest."""
    rank, model = context.rank, deep()
    data = pairs(4, width=WIDTH)[2 * rank : 2 * rank + 2]
    by = Contract(loss_divisor=4)
    source = StageByStage(loss_fn, contract=by) if composed else SingleDevice(deep, loss_fn, by)
    with check_step({0: model}, data, against=source, timeout_s=20.0) as check:
        losses = [loss_fn(model(inputs), target) for inputs, target in data]
        torch.stack(losses).sum().div(4).backward()
        parts, at = dict[str, Any](), 0
        low, high = (cut + (fault == "gap"), 36) if rank else (0, cut)
        for name, one in model.named_parameters():
            if one.grad is not None:
                dist.all_reduce(one.grad)
                first, last = max(at, low), min(at + one.numel(), high)
                if first < last and not (name == "1.bias" and fault == "left out"):
                    whole = name == "1.bias" and fault == "whole"
                    part = one.grad.flatten()[first - at : last - at] * (1 + rank * (fault == "doubled"))
                    parts[name] = one.grad if whole else FlatShard(part, first - at)
                elif fault == "none":
                    parts[name] = None
                at += one.numel()
        check.gradients(parts)
        check.report(losses=[float(one) for one in losses])
    return check.verdict


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("composed", [False, True], ids=["single device", "composed"])
@pytest.mark.parametrize(
    ("cut", "fault", "laws"),
    [
        (20, "", ""),  # inside 1.weight
        (16, "", ""),  # between two parameters
        (0, "", ""),  # rank 0 has nothing
        (0, "none", ""),
        (20, "none", ""),
        (20, "whole", ""),  # one that no other has a part of
        (20, "gap", "shards"),
        (20, "doubled", "gradient"),
        (20, "left out", "presence"),
    ],
)
def test_what_is_left_out_beside_flat_parts_is_no_part(
    composed: bool, cut: int, fault: str, laws: str, world: World
) -> None:
    verdict = world.run(bucketed, composed, cut, fault, ranks=2)[0]
    found = " ".join(law.name for law in verdict.laws if law.outcome == "fail")
    if composed and fault == "gap":  # it does not judge what ranks have in common
        law = verdict.law("gradient")
        assert (law.outcome, law.left_out, law.reasons) == ("unknown", ("1.weight",), (Reason.PARTS,))
    else:
        assert (verdict.outcome, found) == ("fail" if laws else "pass", laws), str(verdict)
        assert fault != "doubled" or not composed or {one.rank for one in verdict.mismatches} == {1}
