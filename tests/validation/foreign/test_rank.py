"""What a rank knows of the model that its step was given."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.core.verdict import Verdict
from pipeproof.foreign import HandedBack, WhiteBox, watch
from pipeproof.foreign.rank import Origin
from tests.support.golden import golden
from tests.support.steps import loss_fn, pairs


def test_what_a_step_replaces_is_kept_so_that_nothing_else_comes_to_lie_there() -> None:
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


def in_halves(model: Any, microbatches: list[Any], *, none: tuple[int, ...]) -> HandedBack:
    """Each rank has half of the rows of ``a``; those of ``none`` hand back no gradient of its weight."""
    rank, losses = dist.get_rank(), []
    rows = slice(4 * rank, 4 * rank + 4)
    half = nn.Linear(8, 4)
    half.load_state_dict({"weight": model.a.weight[rows], "bias": model.a.bias[rows]})
    half.weight.requires_grad_(model.a.weight.requires_grad)
    for x, target in microbatches:
        losses.append(loss_fn(model.b(torch.tanh(Gathered.apply(half(x)))), target))
        (losses[-1] / len(microbatches)).backward()
    weight = None if rank in none else half.weight.grad
    gradients = {half.weight: (weight, rows), half.bias: (half.bias.grad, rows)}
    gradients |= {model.b.weight: model.b.weight.grad, model.b.bias: model.b.bias.grad}
    return HandedBack(nn.ModuleDict({"a": half, "b": model.b}), losses, gradients=gradients)


def judged(whitebox: WhiteBox, none: tuple[int, ...], *, frozen: bool = False) -> Verdict:
    step = partial(in_halves, none=none)
    build = partial(two, frozen=frozen)
    return whitebox.validate(step, reference=build, microbatches=pairs(), ranks={"tp": 2}, loss_fn=loss_fn)


def test_a_part_may_have_no_gradient_where_none_is_due(whitebox: WhiteBox) -> None:
    assert judged(whitebox, ()).verdict == "pass"
    frozen = judged(whitebox, (0, 1), frozen=True)
    assert frozen.verdict == "pass", frozen


def test_parts_without_the_gradient_that_is_due_began_with_the_right_weights(whitebox: WhiteBox) -> None:
    everywhere, one = judged(whitebox, (0, 1)), judged(whitebox, (1,))
    assert [(cause.kind, cause.parameter) for cause in everywhere.cause] == [("missing", "a.weight")], everywhere
    assert one.law("shards").outcome == "fail"
    golden("\n".join(m.seen for m in one.mismatches if m.law == "shards"))
    for verdict in (everywhere, one):
        assert verdict.law("initial-weights").outcome == "pass", verdict


def without_a_call(model: Any, microbatches: list[Any]) -> Any:
    """A weight is changed, and used by functions alone: nothing sees it before."""
    with torch.no_grad():
        model.a.weight.mul_(1.5)
    losses = []
    for x, target in microbatches:
        hidden = nn.functional.linear(x, model.a.weight, model.a.bias)
        losses.append(loss_fn(nn.functional.linear(torch.tanh(hidden), model.b.weight, model.b.bias), target))
        (losses[-1] / len(microbatches)).backward()
    return model, losses


def test_weights_that_were_not_seen_are_not_said_to_be_right(whitebox: WhiteBox) -> None:
    verdict = whitebox.validate(without_a_call, reference=two, microbatches=pairs(), ranks=1, loss_fn=loss_fn)
    assert verdict.verdict == "fail"
    golden("\n".join(map(str, verdict.ruled_out)))
    assert "a.weight" in verdict.law("initial-weights").note


def copied(model: Any, microbatches: list[Any], *, before: bool) -> HandedBack:
    """One gradient is zero in the copies that are handed back, or a parameter's was cleared; then all are cleared."""
    watch(model)
    losses: list[Any] = []
    for x, target in microbatches:
        losses.append(loss_fn(model(x), target))
        (losses[-1] / len(microbatches)).backward()
    if before:
        model.zero_grad()
    kept = {one: torch.zeros_like(one) if k == 0 else one.grad for k, one in enumerate(model.parameters())}
    model.zero_grad()
    return HandedBack([model], losses, gradients=None if before else kept)


@pytest.mark.parametrize("before", [True, False])
def test_what_is_cleared_after_gradients_were_copied_is_not_lost(whitebox: WhiteBox, before: bool) -> None:
    verdict = whitebox.validate(
        partial(copied, before=before), reference=two, microbatches=pairs(2), ranks=1, loss_fn=loss_fn
    )
    assert verdict.verdict == "fail"
    assert any(line.what == "cleared" for cause in verdict.cause for line in cause.lines) is before, str(verdict)
