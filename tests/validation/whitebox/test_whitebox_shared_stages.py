"""Ranks that hold one stage: a model that nobody cut, weights in parts, and weights that are written late."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import StepResult
from pipeproof.core.contract import Contract
from pipeproof.whitebox import WhiteBox
from tests.support import steps
from tests.support.golden import golden
from tests.support.steps import backward, blocks, loss_fn, pairs

COUNT = 4


build_model = partial(blocks, 2, width=5)
data = partial(pairs, COUNT, rows=6, width=5, seed=1)


def uncut(model: Any, microbatches: list[Any], *, whole: bool) -> Any:
    """Nobody cut the model: every rank trains all of it, and hands back all, or one stage."""
    losses = backward(model, microbatches)
    return model if whole else model[0], losses


@pytest.mark.parametrize(("whole", "stage"), [(True, 1), (False, None)])
def test_stages_on_all_ranks_are_no_pipeline_both_ways(whitebox: WhiteBox, whole: bool, stage: int | None) -> None:
    step = partial(uncut, whole=whole)
    verdict = whitebox.validate(step, reference=build_model, microbatches=data(), ranks=2, loss_fn=loss_fn)
    (cause,) = verdict.causes
    assert (verdict.outcome, cause.kind, cause.rank, cause.stage) == ("fail", "partition", None, stage), verdict


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
