"""What passed the boundaries: what was compared, and whom that speaks against."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.sweeps import sampled
from tests.support.two_ranks import (
    COUNT,
    WIDTH,
    all_forward_all_backward,
    called,
    half,
    judged,
    named,
    passes,
    plain,
    plain_block,
    step,
)


def test_a_late_division_is_no_fault_and_a_gradient_halved_on_its_way_is(whitebox: WhiteBox) -> None:
    def late(model: nn.Sequential, microbatches: list[Any], **options: Any) -> Any:
        stage, losses = step(model, microbatches, divisor=1.0, **options)
        for parameter in stage.parameters():
            parameter.grad /= COUNT
        return stage, losses

    def halved(m: int, gradient: Tensor) -> Tensor:
        return gradient / 2

    assert "were not compared" in passes(judged(whitebox, late, plain)).law("boundaries").note
    for one in (step, late):
        verdict = judged(whitebox, partial(one, passed=halved), plain)
        assert verdict.law("boundaries").outcome == "unknown", verdict
        assert named(verdict) == [("scale", 0, 0, ())]
        assert not any("wrong-message" in one.kinds for one in verdict.ruled_out)


@pytest.mark.sweep
def test_what_gradients_show_beside_a_gradient_halved_on_its_way_is_told_too(whitebox: WhiteBox) -> None:
    def cleared(model: nn.Sequential, microbatches: list[Any], **options: Any) -> Any:
        stage, losses = step(model, microbatches, passed=lambda m, gradient: gradient / 2, **options)
        if dist.get_rank() == 0:
            next(stage.parameters()).grad.zero_()
        return stage, losses

    verdict = judged(whitebox, cleared, plain)
    assert [(one.kind, one.rank, one.stage) for one in verdict.causes] == [("scale", 0, 0), ("zero", 0, 0)], str(
        verdict
    )


@pytest.mark.sweep
def test_a_loss_that_is_divided_twice_is_told_beside_what_was_rounded_on_its_way(whitebox: WhiteBox) -> None:
    def rounded(m: int, gradient: Tensor) -> Tensor:
        return gradient.bfloat16().float()

    verdict = judged(whitebox, partial(step, passed=rounded, divisor=3.0 * COUNT), plain)
    assert named(verdict) == [("scale", 1, 1, ()), ("rounded", 0, 0, tuple(range(COUNT)))], str(verdict)


# What a watched stage was sent by one that nobody watched, or only in part.


def sent(x: Tensor, m: int, how: Callable[[Tensor], Tensor]) -> Tensor:
    """Rank 0's output, changed for microbatch 1."""
    return how(x) if m == 1 and dist.get_rank() == 0 else x


CHANGES: list[Callable[[Tensor], Tensor]] = [
    lambda y: y + torch.linspace(0, 1, WIDTH),
    lambda y: y * 1.5,
    lambda y: y.flip(0),
    lambda y: y.bfloat16().float(),
]


@pytest.mark.parametrize("how", sampled(CHANGES, 2), ids=["added", "times", "order", "rounded"])
def test_what_an_unseen_sender_made_is_not_called_altered_on_its_way(
    whitebox: WhiteBox, how: Callable[[Tensor], Tensor]
) -> None:
    def unwatched(model: nn.Sequential, microbatches: list[Any], *, rank_0: Callable[..., Any]) -> Any:
        stage = half(model)
        rank_0(stage) if dist.get_rank() == 0 else watch(stage)
        return stage, all_forward_all_backward(stage, microbatches, lambda s, m, x: sent(called(s, m, x), m, how))

    observed = named(judged(whitebox, partial(unwatched, rank_0=watch), plain))
    assert observed[0][:3] in (("altered", 1, 1), ("rounded", 1, 1)), observed
    for nobody in (lambda stage: None, lambda stage: watch(stage[0])):
        verdict = judged(whitebox, partial(unwatched, rank_0=nobody), plain)
        assert not {kind for kind, *_ in named(verdict)} & {"altered", "scale"}, verdict
        rounded = [cause for cause in verdict.causes if cause.kind == "rounded"]
        golden("\n".join(sorted({one.detail for one in rounded})))
        assert "messages, buffers" not in verdict.details or "does not say" in verdict.details, verdict


# Inputs that no backward reads.


class Positioned(nn.Module):
    """Takes positions beside what flows, and needs them in its forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain_block()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.inner(x + positions) + x  # type: ignore[no-any-return]


class InOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Positioned() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, torch.full((1, WIDTH), float(number)))
        return x


def one_buffer(model: InOrder, microbatches: list[Any], **options: Any) -> Any:
    """Positions lie in one buffer, which is written to for each call and freed for some."""
    stage, buffer = watch(model.layers[dist.get_rank()]), torch.empty(1, WIDTH)

    def call(stage: nn.Module, m: int, x: Tensor) -> Tensor:
        positions = torch.empty(1, WIDTH) if m == 2 else buffer
        result: Tensor = stage(x, positions.fill_(float(dist.get_rank())))
        positions.fill_(-1.0)
        return result

    return stage, all_forward_all_backward(stage, microbatches, call, **options)


@pytest.mark.sweep
def test_what_no_backward_reads_is_not_overwritten(whitebox: WhiteBox) -> None:
    def doubled(m: int, gradient: Tensor) -> Tensor:
        return gradient * 2

    passes(judged(whitebox, one_buffer, InOrder))
    assert named(judged(whitebox, partial(one_buffer, passed=doubled), InOrder)) == [("scale", 0, 0, ())]
