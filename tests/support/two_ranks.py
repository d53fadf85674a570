"""Steps on two ranks, for tests that vary how a stage is called, what it is given and what it hands on."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.steps import WIDTH, loss_fn, pairs

COUNT = 4
Call = Callable[[nn.Module, int, Tensor], Tensor]


data = partial(pairs, COUNT)


def model_of(block: Callable[[], nn.Module], *, frozen: int = 0) -> nn.Sequential:
    """Four blocks, of which the first so many are not trained."""
    torch.manual_seed(3)
    model = nn.Sequential(*(block() for _ in range(4)))
    model[:frozen].requires_grad_(False)
    return model


def plain_block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def half(model: nn.Sequential) -> nn.Sequential:
    return model[2 * dist.get_rank() : 2 * dist.get_rank() + 2]


def called(stage: nn.Module, microbatch: int, x: Tensor) -> Tensor:
    return stage(x)


def all_forward_all_backward(
    stage: nn.Module,
    microbatches: list[Any],
    call: Call = called,
    *,
    passed: Callable[[int, Tensor], Tensor] = lambda m, gradient: gradient,
    divisor: float = COUNT,
) -> list[float] | None:
    """The losses, on the last of two ranks. ``passed``: what becomes of the gradients that it hands on."""
    kept, losses = [], []
    for m, (x, target) in enumerate(microbatches):
        if dist.get_rank() == 0:
            y = call(stage, m, x)
            dist.send(y.detach(), 1)
            kept.append((x, y))
            continue
        x = torch.empty_like(x)
        dist.recv(x, 0)
        loss = loss_fn(call(stage, m, x.requires_grad_()), target)
        losses.append(loss.item())
        kept.append((x, loss / divisor))
    for m, (x, end) in enumerate(kept):
        if dist.get_rank():
            end.backward()
            dist.send(passed(m, x.grad if x.grad is not None else torch.zeros_like(x)), 0)
            continue
        gradient = torch.empty_like(end)
        dist.recv(gradient, 1)
        if end.requires_grad:
            end.backward(gradient)
    return losses or None


def one_by_one(
    stage: Callable[[Tensor], Tensor],
    microbatches: list[Any],
    received: Callable[[int, Tensor], Tensor] = lambda m, x: x,
    *,
    backward: bool = True,
) -> list[float]:
    """The losses, on the last of two ranks, a microbatch at a time. ``received``: what becomes of what it is sent."""
    losses = []
    for m, (x, target) in enumerate(microbatches):
        if dist.get_rank() == 0:
            with torch.set_grad_enabled(backward):
                y = stage(x)
            dist.send(y.detach(), 1)
            if backward:
                gradient = torch.empty_like(y)
                dist.recv(gradient, 1)
                y.backward(gradient)
            continue
        x = torch.empty_like(x)
        dist.recv(x, 0)
        x = received(m, x).requires_grad_()
        with torch.set_grad_enabled(backward):
            loss = loss_fn(stage(x), target)
        if backward:
            (loss / len(microbatches)).backward()
            dist.send(x.grad, 0)
        losses.append(loss.item())
    return losses


def step(
    model: nn.Sequential, microbatches: list[Any], call: Call = called, *, training: bool = True, **options: Any
) -> Any:
    stage = watch(half(model)).train(training)
    return stage, all_forward_all_backward(stage, microbatches, call, **options)


def judged(whitebox: WhiteBox, one: Callable[..., Any], build: Callable[[], nn.Module]) -> Verdict:
    return whitebox.validate(one, reference=build, microbatches=data(), ranks=2, loss_fn=loss_fn)


plain = partial(model_of, plain_block)


def passes(verdict: Verdict) -> Verdict:
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), verdict
    return verdict


def named(verdict: Verdict) -> list[tuple[str, int | None, int | None, tuple[int, ...]]]:
    assert verdict.outcome == "fail", verdict
    return [(cause.kind, cause.rank, cause.stage, cause.microbatches) for cause in verdict.causes]


def without_second(stage: nn.Module, m: int, x: Tensor, *, call: Call = called) -> Tensor:
    """No backward of microbatch 2 comes to a parameter of rank 0."""
    result = call(stage, m, x)
    return result.detach().requires_grad_() if m == 2 and dist.get_rank() == 0 else result
