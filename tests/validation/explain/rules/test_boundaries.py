"""A factor that every stage has once more, told from one that comes in at two places."""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch.nn as nn

from pipeproof import watch
from pipeproof.core.cause import Cause
from pipeproof.core.observe.likeness import Likeness
from pipeproof.core.observe.observed import UNKNOWN_MICROBATCH
from pipeproof.core.observe.recording import MADE, Point
from pipeproof.explain.divergence import Divergence
from pipeproof.explain.rules.boundaries import causes_of
from pipeproof.whitebox import WhiteBox
from tests.support.steps import blocks, loss_fn, pairs


def scaled_links(
    model: Any, microbatches: list[Any], *, after: Collection[int] = (), only: int | None = None, cut: int | None = None
) -> Any:
    """Four stages; output gradients are doubled as they leave those ``after``, of all microbatches or one.

    The graph of stage ``cut`` is cut off from its input.
    """
    stages = [watch(model[k : k + 1]) for k in range(4)]
    if cut is not None:
        inner = stages[cut].forward
        stages[cut].forward = lambda x: inner(x.detach() + 0 * x)
    losses = []
    for number, (x, target) in enumerate(microbatches):
        made: list[Any] = []
        for stage in stages:
            given = x if not made else made[-1][1].detach().requires_grad_()
            made.append((given, stage(given)))
        loss = loss_fn(made[-1][1], target)
        losses.append(loss.item())
        (loss / len(microbatches)).backward()
        for k in reversed(range(3)):
            gradient = made[k + 1][0].grad
            made[k][1].backward(gradient * 2 if k + 1 in after and only in (None, number) else gradient)
    return stages, losses


def test_a_graph_that_was_cut_gives_zeros_that_nobody_wrote(whitebox_here: WhiteBox) -> None:
    step = partial(scaled_links, cut=2)
    verdict = whitebox_here.validate(step, reference=built, microbatches=pairs(4), ranks=1, loss_fn=loss_fn)
    first: Cause = verdict.causes[0]
    assert (first.kind, first.stage, first.action) == ("zero", 2, "2B0")


def built() -> nn.Module:
    return blocks(seed=3)


def test_a_call_whose_microbatch_is_not_known_is_no_microbatch() -> None:
    likeness = Likeness("zero", words="zero")
    found = [Divergence(0, Point(0, m, MADE), f"0F{m}", None, likeness) for m in (UNKNOWN_MICROBATCH, 2)]
    (cause,) = causes_of(found, 4, refine=lambda one: None)
    assert cause.microbatches == (2,)
