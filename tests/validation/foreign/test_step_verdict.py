"""Each operation of a plan is judged once: nothing is judged again until it fits."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipeproof import Contract
from pipeproof.foreign import HandedBack, WhiteBox
from tests.support.judgements import counting_judgements
from tests.support.steps import blocks, loss_fn, pairs

PLAN = ["train", "accumulate", "train", "eval", "train"]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trained(
    model: nn.Module, operations: Iterator[tuple[str, list[Any]]], *, wrong: int | None = None, scale: float = 1.0
) -> Iterator[HandedBack]:
    """Every operation of the plan; in the ``wrong`` one losses lack a part. Gradients of losses are ``scale`` times."""
    optimizer = sgd(model)
    for number, (operation, microbatches) in enumerate(operations):
        with torch.set_grad_enabled(operation != "eval"):
            losses = [loss_fn(model(x), target) * (1 - 0.1 * (number == wrong)) for x, target in microbatches]
        if operation != "eval":
            (sum(losses) * scale / len(losses)).backward()  # type: ignore[union-attr]
        if scale != 1.0:
            for one in model.parameters():
                one.grad = None if one.grad is None else one.grad / scale
        if operation == "train":
            optimizer.step()
        yield HandedBack(model, [loss.item() for loss in losses], loss_scale=None if scale == 1.0 else scale)
        if operation == "train":
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("plan", "made", "judged", "outcome"),
    [
        (PLAN, {}, [0, 1, 2, 3, 4], "pass"),
        (PLAN, {"wrong": 2}, [0, 1, 2], "fail"),  # what follows is not judged
        (["train", "train"], {"scale": 2.0**10}, [0, 1], "pass"),
        (["train", "train"], {"scale": 2.0**10, "wrong": 1}, [0, 1], "fail"),
    ],
)
def test_each_operation_is_judged_once(
    whitebox: WhiteBox, plan: list[str], made: dict[str, Any], judged: list[int], outcome: str
) -> None:
    with counting_judgements() as found:
        verdict = whitebox.validate(
            partial(trained, **made),
            reference=blocks,
            microbatches=pairs(3 * len(plan)),
            ranks=1,
            loss_fn=loss_fn,
            optimizer=sgd,
            contract=Contract(operations=plan),
        )
    assert (verdict.verdict, found) == (outcome, judged), verdict
