"""What watched calls say of a factor: whether a backward ran more than once."""

from functools import partial
from typing import Any

import pytest
import torch.nn as nn

from pipeproof import watch
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import blocks, loss_fn, pairs


@pytest.fixture
def whitebox(whitebox_here: WhiteBox) -> WhiteBox:
    """One rank is enough."""
    return whitebox_here


def first_again(model: Any, microbatches: list[Any], *, times: int = 2, factor: float = 1.0) -> Any:
    """The first stage's forwards and backwards run so often, for one loss."""
    first, second = watch(model[:2]), watch(model[2:])
    losses = []
    for x, target in microbatches:
        handed = [first(x) for _ in range(times)]
        received = handed[0].detach().requires_grad_()
        loss: Any = loss_fn(second(received), target)
        (loss / len(microbatches)).backward()
        for one in handed:
            one.backward(received.grad)
        losses.append(loss.item())
    for parameter in first.parameters():
        parameter.grad *= factor
    return [first, second], losses


def all_again(model: Any, microbatches: list[Any]) -> Any:
    """Every microbatch runs twice through both stages."""
    stages, losses = first_again(model, [one for one in microbatches for _ in range(2)], times=1, factor=1.0)
    for parameter in model.parameters():
        parameter.grad *= 2  # of the loss, which was divided by twice as many
    return stages, losses[::2]


@pytest.mark.parametrize(
    ("step", "kind", "stage"),
    [
        (first_again, "doubled", 0),
        (all_again, "doubled", None),
        (partial(first_again, times=1, factor=2.0), "scale", 0),  # near: the same gradients, of one backward each
    ],
)
def test_backwards_that_ran_again_are_told_from_a_factor(
    whitebox: WhiteBox, step: Any, kind: str, stage: int | None
) -> None:
    verdict = whitebox.validate(step, reference=built, microbatches=pairs(4), ranks=1, loss_fn=loss_fn)
    (cause,) = verdict.causes
    assert (cause.kind, cause.stage, cause.factor) == (kind, stage, 2.0)
    golden(cause.detail)


def built() -> nn.Module:
    return blocks(seed=3)
