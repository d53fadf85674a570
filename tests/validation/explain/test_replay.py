"""Where nobody watched: a substitution that gives all that was observed is named."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.whitebox import WhiteBox
from tests.support.steps import WIDTH, loss_fn
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


CAUSES: dict[str, tuple[dict[str, Change], list[tuple[str, int | None, int | None, tuple[int, ...]]], str]] = {
    "there": ({"there": rounded}, [("rounded", 1, 1, ())], "as if its input is bf16-rounded"),
    "there, of two": (
        {"there": of_some(rounded, 1, 3)},
        [("rounded", 1, 1, (1, 3))],
        "as if its input is bf16-rounded",
    ),
    "back": ({"back": rounded}, [("rounded", 0, 0, ())], "as if its output gradient is bf16-rounded"),
    "back, of one": (
        {"back": of_some(rounded, 2)},
        [("rounded", 0, 0, (2,))],
        "as if its output gradient is bf16-rounded",
    ),
    "both": (
        {"there": rounded, "back": rounded},
        [("rounded", 1, 1, ())],
        "as if its input and its input gradient are bf16-rounded",
    ),
}


@pytest.mark.parametrize("title", CAUSES)
def test_what_was_rounded_between_stages_is_named_with_its_microbatches(whitebox: WhiteBox, title: str) -> None:
    changes, causes, detail = CAUSES[title]
    verdict = judged(whitebox, partial(unwatched, **changes), plain)
    assert named(verdict) == causes, str(verdict)
    assert verdict.causes[0].detail == detail


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
    """``there``: what becomes of both streams on their way to rank 1, ``back`` of their gradients."""
    stage, losses = half(model), []
    for x, target in microbatches:
        if dist.get_rank() == 0:
            streams, gradients = stage(x), [torch.empty_like(x), torch.empty_like(x)]
            for tensor in there([one.detach() for one in streams]):
                dist.send(tensor, 1)
            for gradient in gradients:
                dist.recv(gradient, 1)
            torch.autograd.backward(streams, back(gradients))
            continue
        given = [torch.empty_like(x).requires_grad_(), torch.empty_like(x).requires_grad_()]
        for tensor in given:
            dist.recv(tensor.detach(), 0)
        loss = loss_fn(stage(tuple(given))[0], target)
        losses.append(loss.item())
        (loss / COUNT).backward()
        for tensor in given:
            dist.send(tensor.grad, 0)
    return stage, losses or None


STREAMS: dict[str, tuple[dict[str, Both], tuple[str, int], str]] = {
    "rounded": (
        {"there": lambda two: [two[0], rounded(0, two[1])]},
        ("rounded", 1),
        "as if output 1 of 1 is bf16-rounded",
    ),
    "not filled": (
        {"there": lambda two: [two[0] * 0, two[1]]},
        ("uninitialised", 1),
        "as if output 0 of 1.linear is zero",
    ),
    "exchanged": (
        {"there": lambda two: two[::-1]},
        ("wrong-message", 1),
        "as if output 1 of 1 and output 0 of 1.linear are exchanged",
    ),
    "lost": (
        {"back": lambda two: [two[0], two[1] * 0]},
        ("uninitialised", 0),
        "as if the gradient of output 1 of 1 is zero",
    ),
    "both": (
        {"there": lambda two: [rounded(0, one) for one in two], "back": lambda two: [rounded(0, one) for one in two]},
        ("rounded", 1),
        "as if its input and its input gradient are bf16-rounded",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("title", STREAMS)
def test_one_of_two_streams_of_which_one_is_made_of_the_other(whitebox: WhiteBox, title: str) -> None:
    changes, (kind, stage), detail = STREAMS[title]
    verdict = judged(whitebox, partial(both_ways, **changes), two_streams)
    assert named(verdict) == [(kind, stage, stage, ())], str(verdict)
    assert verdict.causes[0].detail == detail


def noisy(m: int, tensor: Tensor) -> Tensor:
    """About as far off as bf16 is, but not what it gives."""
    generator = torch.Generator().manual_seed(m)
    return tensor * (1 + 2e-3 * (torch.rand(tensor.shape, generator=generator) - 0.5))


@pytest.mark.parametrize("changes", [{"there": noisy}, {"back": noisy}], ids=["there", "back"])
def test_what_no_change_gives_is_not_named(whitebox: WhiteBox, changes: dict[str, Change]) -> None:
    verdict = judged(whitebox, partial(unwatched, **changes), plain)
    assert named(verdict) == [], str(verdict)


@pytest.mark.sweep
def test_more_numbers_than_are_worth_the_time_are_not_tried(
    whitebox: WhiteBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeproof.explain.replay._MOST", 1)
    assert named(judged(whitebox, partial(unwatched, there=rounded), plain)) == []
