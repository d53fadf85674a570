"""A step of one model on one device, held against a record or another model."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from pipeproof.core.verdict import Verdict
from pipeproof.records.step_check import check_step
from tests.support.steps import Pairs

Finish = Callable[[Any, list[float]], object]


def show_all(check: Any, losses: list[float]) -> None:
    """Hand all gradients and losses to ``check``."""
    check.gradients()
    check.report(losses=losses)


def check_here(
    model: nn.Module,
    data: Pairs,
    against: Any,
    *,
    order: Sequence[int] | None = None,
    factor: float = 1.0,
    finish: Finish = show_all,
) -> Verdict:
    """Train by the mean square, microbatches in ``order``, with ``factor`` times their gradients, and ``finish``."""
    losses: dict[int, float] = {}
    with check_step(model, data, against=against) as check:
        for m in range(len(data)) if order is None else order:
            loss = nn.functional.mse_loss(model(data[m][0]), data[m][1])
            (loss * factor / len(data)).backward()
            losses[m] = loss.item()
        finish(check, [losses[m] for m in sorted(losses)])
    return check.verdict
