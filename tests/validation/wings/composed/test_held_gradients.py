"""Hooks that make other gradients leave them unknown, with the norm; in bf16 sums and losses are as exact as that."""

import copy
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


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "pass"), (1.01, "unknown"), (1.1, "fail")])
def test_a_gradient_in_bf16_that_is_a_multiple_does_not_pass_as_rounding(factor: float, outcome: str) -> None:
    """Sums in another order do: they lead nowhere."""
    stages = [one.bfloat16() for one in layers(torch.tanh, torch.sin)]
    data = [(x.bfloat16(), y.bfloat16()) for x, y in DATA]
    job, apart = Job(stages, data), Job([copy.deepcopy(one) for one in stages], data[::-1])
    apart.step()
    with check_step(dict(enumerate(stages)), data, against=Composed(MSE), rename="{}.{}".format) as check:
        losses = job.step()
        for one, other in zip(stages[1].parameters(), apart.stages[1].parameters(), strict=True):
            assert other.grad is not None
            one.grad = other.grad * factor
        check.gradients()
        check.report(losses=losses)
    law = check.verdict.law("gradient")
    assert (law.outcome, law.exact < law.checked) == (outcome, True), str(check.verdict)


def in_fp32(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


def as_it_is(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


@pytest.mark.parametrize(
    ("loss_fn", "factor", "outcome"),
    [
        (in_fp32, 1.0, "pass"),
        (in_fp32, 1.002, "unknown"),
        (in_fp32, 1.2, "fail"),
        (as_it_is, 1.0, "pass"),
        (as_it_is, 1.2, "fail"),
    ],
)
def test_a_loss_that_is_off_by_more_than_its_type_rounds_is_no_rounding(
    loss_fn: object, factor: float, outcome: str
) -> None:
    torch.manual_seed(0)
    stage = nn.Linear(8, 8).bfloat16()
    data = [(torch.randn(2, 4, 8).bfloat16()).unbind() for _ in range(3)]
    with check_step(stage, data, against=Composed(loss_fn)) as check:  # type: ignore[arg-type]
        losses = [loss_fn(stage(x), target) for x, target in data]  # type: ignore[operator]
        for loss in losses:
            (loss / 3).backward()
        check.gradients()
        check.report(losses=[factor * loss.item() for loss in losses])
    assert check.verdict.law("loss").outcome == outcome, str(check.verdict)
