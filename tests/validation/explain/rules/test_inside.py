"""Losses that are all wrong on right weights: the forward is named, unless something else gives other losses too."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.steps import loss_fn, pairs

WIDTH = 8


@pytest.fixture
def whitebox(whitebox_here: WhiteBox) -> WhiteBox:
    """One rank is enough."""
    return whitebox_here


def build(*, normed: bool) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH) if normed else nn.LayerNorm(WIDTH)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), norm)


def step(model: Any, microbatches: list[Any], *, fault: str) -> Any:
    losses = []
    if fault == "evaluation":
        model.eval()
    for number, (x, target) in enumerate(microbatches):
        wrong = fault == "input" or (fault == "one input" and number == 1)
        losses.append(loss_fn(model(x.flip(1) if wrong else x), target))
        (losses[-1] / len(microbatches)).backward()
    return model, losses


def judged(whitebox: WhiteBox, fault: str, *, normed: bool = False) -> Verdict:
    reference = partial(build, normed=normed)
    return whitebox.validate(
        partial(step, fault=fault), reference=reference, microbatches=pairs(4), ranks=1, loss_fn=loss_fn
    )


def test_every_loss_is_another(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, "input")
    assert [one.kind for one in verdict.causes] == ["computation"]
    assert [one.kind for alternative in verdict.alternatives for one in alternative] == ["swapped-data"]


def test_one_loss_or_another_mode_decides_nothing(whitebox: WhiteBox) -> None:
    assert judged(whitebox, "one input").causes == ()
    assert judged(whitebox, "evaluation", normed=True).causes == ()
    assert judged(whitebox, "").outcome == "pass"
