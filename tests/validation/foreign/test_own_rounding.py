"""What rounds more than fp32 does, or is nothing but rounding, is judged by its own rounding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipeproof.foreign import WhiteBox
from pipeproof.judging.tolerance import FP32
from pipeproof.judging.verdict import Verdict
from tests.support.steps import blocks, loss_fn, pairs

WIDTH = 8


def judged(whitebox: WhiteBox, step: Callable[..., Any], **more: Any) -> Verdict:
    wanted = {"microbatches": pairs(seed=0), "ranks": 1, "loss_fn": loss_fn} | more
    return whitebox.validate(step, **wanted)


def before_a_norm() -> nn.Module:
    """The bias of the linear layer has a gradient of rounding alone: what is added to all is taken away again."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def rows_turned(model: nn.Module, microbatches: list[Any], *, added: float = 0.0) -> Any:
    """Right, with rows in another order, which no mean notices; something is ``added`` to that bias's gradient."""
    losses = [loss_fn(model(x.flip(0)), target.flip(0)) for x, target in microbatches]
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    if added:
        assert isinstance(model, nn.Sequential)
        bias = model[0].bias
        assert isinstance(bias, nn.Parameter)
        assert bias.grad is not None
        bias.grad += added
    return model, losses


def test_a_gradient_of_rounding_alone_is_compared_with_its_own_rounding(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, rows_turned, reference=before_a_norm)
    assert (verdict.verdict, verdict.tier) == ("pass", "fp32"), verdict
    assert "rounding alone" in verdict.law("gradient").note
    assert verdict.law("gradient").worst < 1e-6
    assert verdict.floor < 1e-6


def test_what_is_added_to_a_gradient_of_rounding_alone_is_a_fault(whitebox: WhiteBox) -> None:
    def step(model: nn.Module, microbatches: list[Any]) -> Any:
        return rows_turned(model, microbatches, added=1e-4)

    verdict = judged(whitebox, step, reference=before_a_norm)
    assert verdict.verdict == "fail", verdict
    assert [(one.law, one.parameter) for one in verdict.mismatches] == [("gradient", "0.bias")]
    assert "made of what they should be" not in str(verdict)


def in_half() -> nn.Module:
    return blocks().half()


def backwards_first(model: nn.Module, microbatches: list[Any]) -> Any:
    """Right, with the last microbatch first."""
    losses = [loss_fn(model(x), target) for x, target in microbatches]
    for loss in reversed(losses):
        (loss / len(microbatches)).backward()  # type: ignore[no-untyped-call]
    return model, losses


def test_half_precision_rounds_as_it_does_and_no_finer(whitebox: WhiteBox) -> None:
    microbatches = [(x.half(), target.half()) for x, target in pairs(seed=0)]
    verdict = judged(whitebox, backwards_first, reference=in_half, microbatches=microbatches)
    assert (verdict.verdict, verdict.tier) == ("pass", "fp16"), verdict
    assert verdict.law("gradient").worst > FP32.most
