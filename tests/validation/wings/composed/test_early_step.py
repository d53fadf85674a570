"""Weights that are updated before gradients are looked at: it is said how to call it, and no fault is told."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipeproof.core.verdict import Verdict
from pipeproof.records.step_check import check_step
from pipeproof.wings.composed.composed_step import Composed
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, MSE, Job, checked, layers

Update = Callable[[torch.optim.Optimizer], None]


def verdict_of(update: Update, *, midst: bool = False, own: bool = True) -> Verdict:
    """Of a step in which ``update`` comes before ``gradients()``, or in the ``midst`` of all backwards as well.

    ``own``: it is of the step's own weights.
    """
    job = Job(layers(torch.tanh, torch.sin))
    optimizer = torch.optim.SGD(nn.ModuleList(job.stages if own else layers(torch.tanh)).parameters(), lr=0.1)
    with check_step(dict(enumerate(job.stages)), DATA, against=Composed(MSE), rename="{}.{}".format) as check:
        for m, pair in enumerate(DATA):
            job._train(m, *pair)
            if midst or m == len(DATA) - 1:
                update(optimizer)
        check.gradients()
        check.report()
    return check.verdict


def alone(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def and_cleared(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("update", [alone, and_cleared])
def test_a_step_that_was_over_too_early_is_not_judged(update: Update) -> None:
    verdict = verdict_of(update)
    assert verdict.verdict == "unknown", str(verdict)
    golden(str(verdict).splitlines()[0])


def test_a_step_in_the_midst_of_backwards_is_a_fault() -> None:
    assert {one.kind for one in verdict_of(alone, midst=True).cause} == {"weights-changed"}


def test_a_step_of_other_weights_is_nobody_s_business() -> None:
    assert verdict_of(alone, own=False).verdict == "pass"


@pytest.mark.parametrize("microbatches", [1, 3])
def test_steps_inside_backwards_are_not_judged(microbatches: int) -> None:
    job = Job(layers(torch.tanh, torch.sin), DATA[:microbatches])
    for one in nn.ModuleList(job.stages).parameters():
        optimizer = torch.optim.SGD([one], lr=0.1)
        one.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    verdict = checked(job)
    assert verdict.verdict == "unknown", str(verdict)
    golden(str(verdict).splitlines()[0])
