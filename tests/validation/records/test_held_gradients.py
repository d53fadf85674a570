"""Hooks that make other gradients leave them unknown, with the norm; all else is compared."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipeproof import Composed, check_step
from tests.support.pipeline_here import DATA, MSE, Job, layers


def before(weight: nn.Parameter) -> None:
    weight.register_hook(lambda one: one * 0.5)


def after(weight: nn.Parameter) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    weight.register_post_accumulate_grad_hook(halve)


@pytest.mark.parametrize("hook", [before, after])
def test_what_hooks_make_of_gradients_is_unknown_and_so_is_the_norm(
    hook: Callable[[nn.Parameter], None],
) -> None:
    stages = layers(torch.tanh, torch.sin)
    hook(stages[1].layer.weight)  # type: ignore[arg-type, union-attr]  # it is a Layer
    job = Job(stages)
    with check_step(dict(enumerate(stages)), DATA, against=Composed(MSE), rename="{}.{}".format) as check:
        losses = job.step()
        check.gradients()
        check.report(losses=losses, norm=job.norm())
    outcomes = {law.name: (law.outcome, law.left_out) for law in check.verdict.laws}
    assert outcomes["gradient"] == ("unknown", ("1.layer.weight",)), str(check.verdict)
    assert outcomes["grad-norm"][0] == "unknown"
    assert {outcomes[law][0] for law in ("microbatches", "boundaries", "loss", "presence")} == {"pass"}


def test_a_hook_that_only_looks_leaves_all_known() -> None:
    stages, seen = layers(torch.tanh, torch.sin), []
    stages[1].layer.weight.register_post_accumulate_grad_hook(seen.append)  # type: ignore[operator, union-attr]
    job = Job(stages)
    with check_step(dict(enumerate(stages)), DATA, against=Composed(MSE), rename="{}.{}".format) as check:
        losses = job.step()
        check.gradients()
        check.report(losses=losses, norm=job.norm())
    assert (check.verdict.verdict, len(seen)) == ("pass", len(DATA)), str(check.verdict)
