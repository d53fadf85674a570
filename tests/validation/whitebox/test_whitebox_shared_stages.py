"""Ranks that hold one stage: pipelines that run both ways, weights in parts, and weights that are written late."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import StepResult, watch
from pipeproof.core.contract import Contract
from pipeproof.whitebox import WhiteBox
from tests.support import steps
from tests.support.golden import golden
from tests.support.steps import backward, blocks, loss_fn, pairs

COUNT = 4


build_model = partial(blocks, 2, width=5)
data = partial(pairs, COUNT, rows=6, width=5, seed=1)


def both_ways(stages: list[nn.Module], microbatches: list[Any], wrong: int | None = None) -> float:
    """Even microbatches enter at rank 0, odd ones at rank 1; each goes through the other rank's second stage.

    Both ranks know the loss of the step. ``wrong``: the microbatch that comes in at twice its size.
    """
    rank, total = dist.get_rank(), torch.zeros(())
    for m, (x, target) in enumerate(microbatches):
        if m % 2 == rank:
            y = stages[0](2 * x if m == wrong else x)
            dist.send(y.detach(), 1 - rank)
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1 - rank)
            y.backward(gradient)
        else:
            received = torch.empty(6, 5)
            dist.recv(received, 1 - rank)
            loss = loss_fn(stages[1](received.requires_grad_()), target) / COUNT
            loss.backward()
            dist.send(received.grad, 1 - rank)
            total += loss.detach()
    dist.all_reduce(total)
    return total.item()


@dataclass(frozen=True)
class BothWays:
    """A step whose ranks have both stages; ``summed``: those whose gradients are, ``held``: those handed back.

    ``wrong``: the microbatch that comes in at twice its size; ``drifts``: a weight of rank 1 differs.
    """

    watched: bool = False
    summed: tuple[int, ...] = (0, 1)
    held: tuple[int, ...] = (0, 1)
    wrong: int | None = None
    drifts: bool = False

    def __call__(self, model: Any, microbatches: list[Any]) -> Any:
        if self.drifts and dist.get_rank() == 1:
            model[1][0].weight.data = model[1][0].weight.data * 1.01
        stages = [watch(stage) if self.watched else stage for stage in model]
        loss = both_ways(stages, microbatches, self.wrong)
        for stage in self.summed:
            for parameter in stages[stage].parameters():
                dist.all_reduce(parameter.grad)
        return [stages[stage] for stage in self.held], loss


def uncut(model: Any, microbatches: list[Any]) -> Any:
    """Nobody cut the model."""
    return model, backward(model, microbatches)


# A step; kind, rank, stage and parameter of its cause.
STEPS: dict[str, tuple[Any, tuple[str, int | None, int | None, str | None] | None]] = {
    "right": (BothWays(), None),
    "right, watched": (BothWays(watched=True), None),
    "not summed": (BothWays(summed=(0,)), ("not-reduced", None, 1, None)),
    "not summed, watched": (BothWays(watched=True, summed=(0,)), ("not-reduced", None, 1, None)),
    "a stage on all ranks": (BothWays(held=(0,)), ("partition", None, None, None)),
    "uncut": (uncut, ("partition", None, 1, None)),
    "a copy that drifted": (BothWays(drifts=True), ("altered", 1, 1, "1.0.weight")),
}


@pytest.mark.parametrize("name", STEPS)
def test_mirrored_stages_are_replicas(whitebox: WhiteBox, name: str) -> None:
    step, expected = STEPS[name]
    verdict = whitebox.validate(step, reference=build_model, microbatches=data(), ranks=2, loss_fn=loss_fn)
    if expected is None:
        assert (verdict.outcome, verdict.law("replicas").checked) == ("pass", 4), verdict
        return
    (cause,) = verdict.causes
    assert (verdict.outcome, cause.kind, cause.rank, cause.stage) == ("fail", *expected[:3]), verdict
    assert expected[3] in (None, cause.parameter)
    if cause.kind == "not-reduced":
        golden(cause.detail)


@pytest.mark.sweep
@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_what_is_wrong_is_on_its_microbatchs_rank(whitebox: WhiteBox, wrong: int) -> None:
    step = BothWays(watched=True, wrong=wrong)
    verdict = whitebox.validate(step, reference=build_model, microbatches=data(), ranks=2, loss_fn=loss_fn)
    first = next(one for one in verdict.mismatches if one.law == "boundaries")
    assert (first.rank, first.stage, first.microbatch) == (wrong % 2, 0, wrong), str(verdict)
    assert {cause.rank for cause in verdict.causes if cause.microbatches == (wrong,)} == {wrong % 2}, str(verdict)


def one_linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 6, bias=False)


def rows_by_hand(model: nn.Linear, microbatches: list[Any], alike: bool = False) -> StepResult:
    """Each rank has half of the rows, in a module of its own. ``alike``: both ranks begin with the first half."""
    first = 3 * dist.get_rank()
    own, rows, losses = nn.Linear(5, 3, bias=False), slice(first, first + 3), []
    own.weight.data = model.weight.data[:3] if alike else model.weight.data[rows]
    for x, target in microbatches:
        loss = (own(x) - target[:, rows]).square().sum() / target.numel()
        (loss / COUNT).backward()
        losses.append(loss.detach())
        dist.all_reduce(losses[-1])
    return StepResult(own, losses, gradients={"weight": (own.weight.grad, rows)})


@pytest.mark.sweep
@pytest.mark.parametrize("alike", [False, True])
def test_weights_cut_by_hand_are_put_together(whitebox: WhiteBox, alike: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    pairs_ = [(torch.randn(4, 5, generator=draw), torch.randn(4, 6, generator=draw)) for _ in range(COUNT)]
    verdict = whitebox.validate(
        partial(rows_by_hand, alike=alike), reference=one_linear, microbatches=pairs_, ranks={"tp": 2}, loss_fn=loss_fn
    )
    assert verdict.outcome == ("fail" if alike else "pass"), verdict
    assert (verdict.law("initial-weights").outcome, verdict.law("initial-weights").checked) == (verdict.outcome, 2)


# Weights that two replicas write when they next use them, each half of the rows on one of them.

sgd = partial(steps.sgd, rate=0.5)
ROWS = (slice(0, 4), slice(4, 8))


def in_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))


def train(
    model: nn.Module,
    operations: Any,
    *,
    forgets: Sequence[int] = (),
    rate: float = 0.5,
    complete: bool = False,
    masters: bool = False,
    apart: bool = False,
) -> Iterator[StepResult]:
    """ZeRO-1: each rank updates its half of the rows; a layer's own hook gathers the other when it is next used.

    forgets: the ranks whose first layer never gets the other half. complete: all is there before it is handed back.
    apart: rank 1 never steps, and nothing is gathered.
    """
    rank, optimizer, later = dist.get_rank(), sgd(model, rate=rate), dict[nn.Module, Tensor]()

    def fetch(layer: nn.Module, _: object = None) -> None:
        if layer in later:
            layer.weight.data.copy_(later.pop(layer))

    layers = [one for one in model if isinstance(one, nn.Linear)]
    for layer in layers:
        layer.register_forward_pre_hook(fetch)
    for _, microbatches in operations:
        optimizer.zero_grad()
        losses = backward(model, microbatches)
        for layer in layers:
            dist.all_reduce(layer.weight.grad)
            layer.weight.grad /= 2
        old = [layer.weight.detach().clone() for layer in layers]
        if not (apart and rank):
            optimizer.step()
        for layer, begun in zip(layers, old, strict=True) if not apart else ():
            new = layer.weight.detach().clone()
            layer.weight.data[ROWS[1 - rank]] = begun[ROWS[1 - rank]]
            if rank not in forgets or layer is not layers[0]:
                later[layer] = new
            if complete:
                fetch(layer)
        yield StepResult(model, losses, masters=masters)


def data_of_eight() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(3, 8), torch.randn(3, 8)) for _ in range(8)]


CASES: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    # name: outcome, the outcome of updated-parameters, the step, optimizer=
    "there": ("pass", "pass", {"complete": True}, sgd),
    "late": ("unknown", "unknown", {}, sgd),  # after the last operation nobody sees them written
    "late-no-optimizer": ("pass", "not observed", {}, None),
    "late-masters": ("pass", "not observed", {"masters": True}, sgd),
    "late-wrong-rate": ("fail", "fail", {"rate": 0.4}, sgd),
    "forgotten-on-one": ("fail", "fail", {"forgets": [1]}, None),
    "forgotten-on-both": ("fail", "fail", {"forgets": [0, 1]}, None),
    "forgotten-masters": ("fail", "not observed", {"forgets": [1], "masters": True}, sgd),
    "apart": ("fail", "fail", {"apart": True}, None),
}


@pytest.mark.parametrize(("outcome", "updated", "how", "optimizer"), CASES.values(), ids=CASES)
def test_late_weights_are_those_of_the_next_operation(
    whitebox: WhiteBox, outcome: str, updated: str, how: dict[str, Any], optimizer: Any
) -> None:
    verdict = whitebox.validate(
        partial(train, **how),
        reference=in_layers,
        microbatches=data_of_eight(),
        ranks=[0, 1],
        loss_fn=loss_fn,
        optimizer=optimizer,
        contract=Contract(operations=["train", "train"]),
    )
    law = verdict.law("updated-parameters")
    assert (verdict.outcome, law.outcome) == (outcome, updated), verdict
    if outcome == "unknown":
        golden(law.note)
        assert law.left_out == ("0.weight", "2.weight")
