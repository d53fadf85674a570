"""What ranks hand back in parts: right parts pass, what makes up no whole is said, the rank that is wrong is named."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from pipeproof import StepResult, watch
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import WIDTH, backward, loss_fn, pairs


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))


losses_of = partial(backward, divisor=4)


def reduced(model: nn.Module, microbatches: list[Any]) -> tuple[dict[str, Any], list[float]]:
    losses = losses_of(model, microbatches)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return {name: parameter.grad for name, parameter in model.named_parameters()}, losses


def in_rows(model: Any, microbatches: list[Any], *, rows: Any) -> StepResult:
    """Each rank hands back its ``rows`` of the first weight's gradient."""
    gradients, losses = reduced(model, microbatches)
    whole, own = gradients.pop("0.weight"), rows[dist.get_rank()]
    if own is not None:
        part = torch.cat([whole[one] for one in own]) if isinstance(own, list) else whole[own]
        gradients["0.weight"] = (part, own)
    return StepResult(gradients, losses)


def judged(whitebox: WhiteBox, step: Any, ranks: Any = None, reference: Any = build) -> Verdict:
    ranks = ranks or {"dp": 2}
    return whitebox.validate(step, reference=reference, microbatches=pairs(4), ranks=ranks, loss_fn=loss_fn)


def every_other(first: int) -> list[slice]:
    """As the rows of queries, keys and values that a rank has of one fused weight."""
    return [slice(k, k + 2) for k in range(first, 12, 4)]


class Spare(nn.Module):
    """A parameter without gradient, of whose three rows the fourth rank has none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def sharded(model: Any, microbatches: list[Any]) -> StepResult:
    fully_shard(model)
    return StepResult(
        model, losses_of(model, microbatches, divisor=1)
    )  # each rank has one microbatch, and their mean is expected


def by_name(model: Any, microbatches: list[Any]) -> StepResult:
    losses = losses_of(watch(model), microbatches)
    return StepResult({name: parameter.grad for name, parameter in model.named_parameters()}, losses)


class Idle(nn.Module):
    """A model with a part that nothing goes through, as an expert that no token visits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.busy, self.idle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.busy(x)


def filled(model: Any, microbatches: list[Any], *, value: float, times: float = 1.0) -> StepResult:
    """What has no gradient has one of this value, and the others are so many times theirs."""
    losses = losses_of(model, microbatches)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value) if parameter.grad is None else parameter.grad * times
        dist.all_reduce(parameter.grad)
    return StepResult(model, losses)


def rows(*own: Any) -> Any:
    return partial(in_rows, rows=own)


# A right step, on what ranks, of what model, and a law whose note is golden.
RIGHT: dict[str, tuple[Any, Any, Any, str]] = {
    "unequal rows": (rows(slice(0, 5), slice(5, 12)), None, build, ""),
    "pieces": (rows(every_other(0), every_other(2)), None, build, ""),
    "whole on both": (rows(slice(None), slice(None)), None, build, ""),
    "a shard of nothing": (sharded, {"fsdp": 4}, Spare, ""),
    "gradients by name": (by_name, 1, build, "boundaries"),
    "zeros": (partial(filled, value=0.0), None, Idle, "presence"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_parts_pass(whitebox: WhiteBox, name: str) -> None:
    step, ranks, reference, law = RIGHT[name]
    verdict = judged(whitebox, step, ranks, reference)
    assert verdict.outcome == "pass", verdict
    assert (verdict.law("shards").checked == 1) == (reference is build and ranks is None)
    if law:
        golden(verdict.law(law).note)


def cut_short(model: Any, microbatches: list[Any]) -> StepResult:
    """A part without its place."""
    gradients, losses = reduced(model, microbatches)
    return StepResult({**gradients, "2.bias": gradients["2.bias"][:3]}, losses)


def of_whole_numbers(model: Any, microbatches: list[Any]) -> StepResult:
    gradients, losses = reduced(model, microbatches)
    return StepResult({name: one.long() for name, one in gradients.items()}, losses)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("step", "outcome"),
    [
        (rows(slice(0, 7), slice(5, 12)), "fail"),
        (rows(slice(0, 5), slice(7, 12)), "fail"),
        (rows(slice(0, 5), None), "fail"),
        (cut_short, "fail"),
        (of_whole_numbers, "unknown"),
    ],
    ids=["overlap", "hole", "one is missing", "no place", "whole numbers"],
)
def test_what_makes_up_no_whole_is_said(whitebox: WhiteBox, step: Any, outcome: str) -> None:
    verdict = judged(whitebox, step)
    assert (verdict.outcome, verdict.causes) == (outcome, ())
    golden("".join(verdict.undecided) or verdict.details.splitlines()[0].partition(": ")[2])


def with_one_wrong(model: Any, microbatches: list[Any], *, wrong: int) -> StepResult:
    """Shards over two ranks, in two copies: what they are held against may itself be wrong."""
    gradients, losses = reduced(model, microbatches)
    rank, made = dist.get_rank(), {}
    for name, one in gradients.items():
        half = len(one) // 2
        own = slice(rank % 2 * half, (rank % 2 + 1) * half)
        made[name] = ((0.5 if rank == wrong else 1.0) * one[own], own)
    return StepResult(made, losses)


def in_halves(model: Any, microbatches: list[Any], *, fault: str) -> StepResult:
    """Two replicas, each of which keeps its half of every gradient; the second's is wrong."""
    own, second = [], dist.get_rank() == 1
    losses = []
    for number, (x, target) in enumerate(microbatches):
        loss = loss_fn(model(x), target)
        made = torch.autograd.grad(loss / 4, list(model.parameters()))
        own.append([2 * one if fault == "doubled" and second and number == 1 else one for one in made])
        losses.append(loss.item())
    gradients: dict[str, Any] = {}
    for k, (name, _) in enumerate(model.named_parameters()):
        whole = torch.stack([made[k] for made in own]).sum(dim=0)
        dist.all_reduce(whole)
        if fault == "doubled":
            extra = own[1][k] / 2 if second else torch.zeros_like(whole)
            dist.broadcast(extra, 1)
            whole -= extra * (not second)  # the first half has it once
        half = len(whole) // 2
        rows = slice(half, None) if second else slice(0, half)
        gradients[name] = (-whole[rows] if fault == "sign" and second else whole[rows], rows)
    return StepResult(gradients, losses)


FOUR = {"dp_replicate": 2, "dp_shard": 2}
# A wrong step, on what ranks, of what model; kind, rank, stage, microbatches and factor of its cause.
WRONG: dict[str, tuple[Any, Any, Any, tuple[Any, ...]]] = {
    "half on rank 0": (partial(with_one_wrong, wrong=0), FOUR, build, ("scale", 0, 0, (), 0.5)),
    "half on rank 1": (partial(with_one_wrong, wrong=1), FOUR, build, ("scale", 1, 0, (), 0.5)),
    "half on rank 3": (partial(with_one_wrong, wrong=3), FOUR, build, ("scale", 3, 0, (), 0.5)),
    "right halves": (partial(in_halves, fault=""), {"fsdp": 2}, build, ()),
    "sign of a half": (partial(in_halves, fault="sign"), {"fsdp": 2}, build, ("sign", 1, 0, (), -1.0)),
    "doubled in a half": (partial(in_halves, fault="doubled"), {"fsdp": 2}, build, ("doubled", 1, 0, (3,), 2.0)),
    "more than zeros": (partial(filled, value=0.1), None, Idle, ("unexpected", None, 0, (), None)),
    "twice, beside zeros": (partial(filled, value=0.0, times=2.0), None, Idle, ("scale", None, 0, (), 2.0)),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_rank_that_is_wrong_is_named(whitebox: WhiteBox, name: str) -> None:
    step, ranks, reference, cause = WRONG[name]
    verdict = judged(whitebox, step, ranks, reference)
    assert verdict.outcome == ("fail" if cause else "pass"), verdict
    found = [(one.kind, one.rank, one.stage, one.microbatches, one.factor) for one in verdict.causes]
    assert found == [(*cause[:4], factor and pytest.approx(factor, rel=1e-5)) for factor in cause[4:]], verdict
    assert ranks is None or "not-reduced" not in {kind for one in verdict.ruled_out for kind in one.kinds}
    if "half" in name or "halves" in name:
        assert verdict.cells is None or ranks is FOUR
        assert not cause or verdict.mismatches[0].rank == cause[1]
    if ranks == {"fsdp": 2}:
        assert not {kind for one in verdict.ruled_out for kind in one.kinds}
