"""What watched calls and losses say of causes: whether a backward ran more than once, or another forward did."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn

from pipeproof import watch
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import backward, blocks, loss_fn, pairs


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
    whitebox_here: WhiteBox, step: Any, kind: str, stage: int | None
) -> None:
    verdict = whitebox_here.validate(step, reference=built, microbatches=pairs(4), ranks=1, loss_fn=loss_fn)
    (cause,) = verdict.causes
    assert (cause.kind, cause.stage, cause.factor) == (kind, stage, 2.0)
    golden(cause.detail)


def built() -> nn.Module:
    return blocks(seed=3)


WIDTH = 8


def build(*, normed: bool) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH) if normed else nn.LayerNorm(WIDTH)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), norm)


def other_step(model: Any, microbatches: list[Any], *, fault: str) -> Any:
    wrong = {"input": range(len(microbatches)), "one input": [1]}.get(fault, ())
    given = [(x.flip(1) if m in wrong else x, target) for m, (x, target) in enumerate(microbatches)]
    return model, backward(model.train(fault != "evaluation"), given)


def judged(whitebox_here: WhiteBox, fault: str, *, normed: bool = False) -> Verdict:
    reference = partial(build, normed=normed)
    return whitebox_here.validate(
        partial(other_step, fault=fault), reference=reference, microbatches=pairs(4), ranks=1, loss_fn=loss_fn
    )


def test_every_loss_is_another(whitebox_here: WhiteBox) -> None:
    verdict = judged(whitebox_here, "input")
    assert [one.kind for one in verdict.causes] == ["computation"]
    assert [one.kind for alternative in verdict.alternatives for one in alternative] == ["swapped-data"]


def test_one_loss_or_another_mode_decides_nothing(whitebox_here: WhiteBox) -> None:
    assert judged(whitebox_here, "one input").causes == ()
    assert judged(whitebox_here, "evaluation", normed=True).causes == ()
    assert judged(whitebox_here, "").outcome == "pass"
