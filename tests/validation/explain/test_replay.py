"""Where nobody watched: a substitution that gives all that was observed is named."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import WIDTH, loss_fn
from tests.support.sweeps import some
from tests.support.two_ranks import COUNT, all_forward_all_backward, called, half, judged, named, plain

Change = Callable[[int, Tensor], Tensor]


def same(m: int, tensor: Tensor) -> Tensor:
    return tensor


def unwatched(model: nn.Sequential, microbatches: list[Any], *, there: Change = same, back: Change = same) -> Any:
    """``there``: what becomes of the stage's input on rank 1, ``back`` of the gradient that it hands on."""
    stage = half(model)

    def call(stage: nn.Module, m: int, x: Tensor) -> Tensor:
        if dist.get_rank():
            with torch.no_grad():
                x.copy_(there(m, x))
        return called(stage, m, x)

    return stage, all_forward_all_backward(stage, microbatches, call, passed=back)


def rounded(m: int, tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


def of_some(change: Change, *microbatches: int) -> Change:
    return lambda m, tensor: change(m, tensor) if m in microbatches else tensor


class Added(nn.Module):
    """Adds up what it is given before anything else, so that one stream is made of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        made, total = given if isinstance(given, tuple) else (given, torch.tanh(given))
        total = total + made * 2
        return self.linear(torch.tanh(total)), total


class Streams(nn.Sequential):
    """Two streams, and only the first is left in the end."""

    def forward(self, x: Any) -> Any:
        made = super().forward(x)
        return made[0] if len(self) == 4 else made


def two_streams() -> nn.Module:
    torch.manual_seed(0)
    return Streams(*(Added() for _ in range(4)))


Both = Callable[[list[Tensor]], list[Tensor]]


def both_ways(model: Streams, microbatches: list[Any], *, there: Both = list, back: Both = list) -> Any:
    """Each rank runs both halves. ``there``: what becomes of both streams between them, ``back`` of their gradients."""
    losses = []
    for x, target in microbatches:
        streams = model[:2](x)
        given = [one.detach().clone().requires_grad_() for one in there([one.detach() for one in streams])]
        losses.append(loss_fn(model[2:](tuple(given))[0], target))
        (losses[-1] / COUNT).backward()
        torch.autograd.backward(streams, back([one.grad for one in given]))  # type: ignore[misc]
    return half(model), [loss.item() for loss in losses] if dist.get_rank() else None


def noisy(m: int, tensor: Tensor) -> Tensor:
    """About as far off as bf16 is, but not what it gives."""
    generator = torch.Generator().manual_seed(m)
    return tensor * (1 + 2e-3 * (torch.rand(tensor.shape, generator=generator) - 0.5))


def both(change: Both) -> dict[str, Any]:
    return {"there": change, "back": change}


def rounded_both(two: list[Tensor]) -> list[Tensor]:
    return [rounded(0, one) for one in two]


# What is changed of one stream, or of two of which one is made of the other; the cause's kind, its stage, which is its
# rank, and its microbatches. What no change gives is not named.
CAUSES: dict[str, tuple[Any, dict[str, Any], list[tuple[str, int, tuple[int, ...]]]]] = {
    "there": (unwatched, {"there": rounded}, [("rounded", 1, ())]),
    "there, of two": (unwatched, {"there": of_some(rounded, 1, 3)}, [("rounded", 1, (1, 3))]),
    "back": (unwatched, {"back": rounded}, [("rounded", 0, ())]),
    "back, of one": (unwatched, {"back": of_some(rounded, 2)}, [("rounded", 0, (2,))]),
    "both": (unwatched, both(rounded), [("rounded", 1, ())]),
    "noise there": (unwatched, {"there": noisy}, []),
    "noise back": (unwatched, {"back": noisy}, []),
    "a stream is rounded": (both_ways, {"there": lambda two: [two[0], rounded(0, two[1])]}, [("rounded", 1, ())]),
    "a stream is not filled": (both_ways, {"there": lambda two: [two[0] * 0, two[1]]}, [("uninitialised", 1, ())]),
    "streams are exchanged": (both_ways, {"there": lambda two: two[::-1]}, [("wrong-message", 1, ())]),
    "a stream is lost": (both_ways, {"back": lambda two: [two[0], two[1] * 0]}, [("uninitialised", 0, ())]),
    "both streams": (both_ways, both(rounded_both), [("rounded", 1, ())]),
}


@pytest.mark.parametrize("title", some(CAUSES, [title for title in CAUSES if "stream" in title]))
def test_what_happened_between_stages_is_named_with_its_microbatches(whitebox: WhiteBox, title: str) -> None:
    step, changes, expected = CAUSES[title]
    verdict = judged(whitebox, partial(step, **changes), plain if step is unwatched else two_streams)
    assert named(verdict) == [(kind, stage, stage, those) for kind, stage, those in expected], str(verdict)
    if expected:
        golden(verdict.causes[0].detail)


@pytest.mark.sweep
def test_more_numbers_than_are_worth_the_time_are_not_tried(
    whitebox: WhiteBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeproof.explain.replay._MOST", 1)
    assert named(judged(whitebox, partial(unwatched, there=rounded), plain)) == []
