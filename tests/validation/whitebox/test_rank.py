"""What a rank knows of the model that its step was given."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import StepResult, watch
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.rank import Origin
from tests.support.golden import golden
from tests.support.steps import backward, loss_fn, pairs


def test_what_a_step_replaces_is_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    origin, freed = Origin(model), weakref.ref(model[1])
    assert origin.name(model[1], "weight", model[1].weight) == "1.weight"
    model[1] = nn.Linear(2, 2)
    gc.collect()
    assert freed() is not None
    assert origin.name(model[1], "weight", model[1].weight) is None


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def two(*, frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Two()
    model.a.weight.requires_grad_(not frozen)
    return model


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.chunk(2, -1)[dist.get_rank()].contiguous()


def in_halves(model: Any, microbatches: list[Any], *, none: tuple[int, ...]) -> StepResult:
    """Each rank has half of the rows of ``a``; those of ``none`` hand back no gradient of its weight."""
    rank = dist.get_rank()
    rows = slice(4 * rank, 4 * rank + 4)
    half = nn.Linear(8, 4)
    half.load_state_dict({"weight": model.a.weight[rows], "bias": model.a.bias[rows]})
    half.weight.requires_grad_(model.a.weight.requires_grad)
    losses = backward(lambda x: model.b(torch.tanh(Gathered.apply(half(x)))), microbatches)
    weight = None if rank in none else half.weight.grad
    gradients = {half.weight: (weight, rows), half.bias: (half.bias.grad, rows)}
    gradients |= {model.b.weight: model.b.weight.grad, model.b.bias: model.b.bias.grad}
    return StepResult(nn.ModuleDict({"a": half, "b": model.b}), losses, gradients=gradients)


def without_a_call(model: Any, microbatches: list[Any]) -> Any:
    """A weight is changed, and used by functions alone: nothing sees it before."""
    with torch.no_grad():
        model.a.weight.mul_(1.5)

    def called(x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, model.a.weight, model.a.bias)
        return nn.functional.linear(torch.tanh(hidden), model.b.weight, model.b.bias)

    return model, backward(called, microbatches)


def copied(model: Any, microbatches: list[Any], *, before: bool) -> StepResult:
    """One gradient is zero in the copies that are handed back, or a parameter's was cleared; then all are cleared."""
    losses = backward(watch(model), microbatches)
    if before:
        model.zero_grad()
    kept = {one: torch.zeros_like(one) if k == 0 else one.grad for k, one in enumerate(model.parameters())}
    model.zero_grad()
    return StepResult([model], losses, gradients=None if before else kept)


FROZEN, TP = partial(two, frozen=True), {"tp": 2}
# A step, its reference, its ranks; the kinds of its causes, None for a step that passes.
STEPS: dict[str, tuple[Any, Any, Any, list[str] | None]] = {
    "in halves": (partial(in_halves, none=()), two, TP, None),
    "in halves, of a frozen one": (partial(in_halves, none=(0, 1)), FROZEN, TP, None),
    "no gradient anywhere": (partial(in_halves, none=(0, 1)), two, TP, ["missing"]),
    "no gradient on one": (partial(in_halves, none=(1,)), two, TP, []),
    "not called": (without_a_call, two, 1, []),
    "cleared before": (partial(copied, before=True), two, 1, ["missing"]),
    "cleared after": (partial(copied, before=False), two, 1, ["zero"]),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_a_rank_brings_back(whitebox: WhiteBox, name: str) -> None:
    """Parts without a gradient, weights that no call showed, and gradients that were cleared once they were copied."""
    step, reference, ranks, causes = STEPS[name]
    verdict = whitebox.validate(step, reference=reference, microbatches=pairs(), ranks=ranks, loss_fn=loss_fn)
    assert verdict.outcome == ("pass" if causes is None else "fail"), verdict
    assert [one.kind for one in verdict.causes] == (causes or []), verdict
    if name.startswith("no gradient"):
        assert verdict.law("initial-weights").outcome == "pass", verdict
        assert verdict.law("shards").outcome == ("fail" if "on one" in name else "pass")
        golden("\n".join(f"{one.law}: {one.parameter} {one.observed_text}" for one in verdict.mismatches))
    if name == "not called":
        golden("\n".join(map(str, verdict.ruled_out)))
        assert "a.weight" in verdict.law("initial-weights").note
    if name.startswith("cleared"):
        told = any(line.what == "cleared" for cause in verdict.causes for line in cause.lines)
        assert told == (name == "cleared before"), str(verdict)
