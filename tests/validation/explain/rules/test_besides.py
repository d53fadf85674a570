"""What is wrong besides backwards that did not run: named as well, or said to be open; nothing where they give all."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import StepResult, watch
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import WIDTH, backward, blocks, loss_fn, pairs

COUNT = 4
SKIPPED = 1
Spoil = Callable[[nn.Module, nn.Module], None]


def nothing(first: nn.Module, second: nn.Module) -> None:
    """Is right."""


def skipping(model: Any, microbatches: list[Any], *, before: Spoil = nothing, after: Spoil = nothing) -> Any:
    """The first stage's backward of one microbatch is left out."""
    first, second = watch(model[:2]), watch(model[2:])
    before(first, second)
    losses = []
    for m, (x, target) in enumerate(microbatches):
        handed = first(x)
        received = handed.detach().requires_grad_()
        loss: Any = loss_fn(second(received), target)
        (loss / len(microbatches)).backward()
        if m != SKIPPED:
            handed.backward(received.grad)
        losses.append(loss.item())
    after(first, second)
    return [first, second], losses


def told(whitebox: WhiteBox, **spoil: Spoil) -> Verdict:
    step = partial(skipping, **spoil)
    verdict = whitebox.validate(step, reference=blocks, microbatches=pairs(COUNT), ranks=1, loss_fn=loss_fn)
    first = verdict.causes[0]
    assert (first.kind, first.stage, first.microbatches) == ("dropped", 0, (SKIPPED,)), verdict
    golden(first.detail)
    return verdict


def twice(stage: nn.Module) -> None:
    for parameter in stage.parameters():
        assert parameter.grad is not None
        parameter.grad *= 2


def zeroed(first: nn.Module, second: nn.Module) -> None:
    grad = dict(second.named_parameters())["2.0.weight"].grad
    grad.zero_()


def begun(first: nn.Module, second: nn.Module) -> None:
    for parameter in second.parameters():
        parameter.grad = torch.ones_like(parameter)


def noise(first: nn.Module, second: nn.Module) -> None:
    draw = torch.Generator().manual_seed(5)
    for parameter in second.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        ({}, []),
        ({"after": lambda first, second: twice(second)}, [("scale", 1, None)]),
        ({"after": lambda first, second: twice(first)}, [("scale", 0, None)]),
        ({"after": zeroed}, [("zero", 1, "2.0.weight")]),
        ({"before": begun}, [("stale-gradient", 1, None)]),
        ({"after": noise}, None),
    ],
    ids=["nothing", "the other stage twice", "the same stage twice", "one of the other cleared", "left over", "noise"],
)
def test_a_second_fault_in_gradients_is_named(
    whitebox_here: WhiteBox, spoil: dict[str, Spoil], found: list[tuple[str, int, str | None]] | None
) -> None:
    verdict = told(whitebox_here, **spoil)
    if found is None:  # nothing explains it
        assert any(line.startswith("stage 1: ") for line in verdict.undecided), verdict
    else:
        named = [(one.kind, one.stage, one.parameter) for one in verdict.causes[1:]]
        assert (named, verdict.undecided) == (found, ())


def replicated(model: nn.Sequential, microbatches: list[Any], *, but_for: str) -> Any:
    """Two replicas, of which one skips its first backward. ``but_for``: what is not reduced has this in its name."""
    stage = watch(model)
    losses = backward(stage, microbatches, skipped=[0] if dist.get_rank() else [])
    for name, parameter in stage.named_parameters():
        assert parameter.grad is not None
        if not but_for or but_for not in name:
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
    return stage, losses


@pytest.mark.parametrize(
    ("but_for", "named"),
    [("", []), ("3.0.bias", ["not-reduced"]), ("bias", ["not-reduced"])],
    ids=["nothing", "one", "half of all"],
)
def test_what_ranks_do_not_reduce_is_told_beside_a_backward_that_did_not_run(
    whitebox: WhiteBox, but_for: str, named: list[str]
) -> None:
    step = partial(replicated, but_for=but_for)
    verdict = whitebox.validate(step, reference=blocks, microbatches=pairs(COUNT), ranks=[0, 1], loss_fn=loss_fn)
    assert [one.kind for one in verdict.causes] == ["dropped", *named], verdict
    assert verdict.law("replicas").outcome == ("fail" if but_for else "pass")
    assert all(one.rank is None for one in verdict.causes[1:])
    assert not verdict.undecided, verdict


class Tied(nn.Module):
    """The second stage has nothing but a copy of the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def copied(model: Tied, microbatches: list[Any], *, skipped: int, factor: float = 1.0) -> Any:
    """Stage ``skipped`` leaves a backward out, and so does the one before. ``factor``: of the second one's share.

    Each rank runs both stages, and watches and hands back its own.
    """
    rank, losses = dist.get_rank(), []
    model.second.weight = nn.Parameter(model.second.weight.detach().clone())
    first, second = stages = [watch(one) if k == rank else one for k, one in enumerate((model.first, model.second))]
    for m, (x, target) in enumerate(microbatches):
        made = torch.tanh(first(x))
        received = made.detach().requires_grad_()
        loss = loss_fn(second(received), target)
        losses.append(loss.item())
        if m != SKIPPED or skipped == 0:
            (loss / COUNT).backward()
        if m != SKIPPED:
            made.backward(received.grad)
    assert first.weight.grad is not None
    assert second.weight.grad is not None
    both = first.weight.grad + factor * second.weight.grad
    first.weight.grad = second.weight.grad = both
    return StepResult(stages[rank], losses if rank else None)


@pytest.mark.sweep
@pytest.mark.parametrize(("skipped", "factor"), [(0, 1.0), (1, 1.0), (0, 2.0)])
def test_copies_are_what_the_backwards_that_did_not_run_leave_of_them(
    whitebox: WhiteBox, skipped: int, factor: float
) -> None:
    step = partial(copied, skipped=skipped, factor=factor)
    verdict = whitebox.validate(step, reference=Tied, microbatches=pairs(COUNT), ranks=2, loss_fn=loss_fn)
    first, *others = verdict.causes
    assert (first.kind, first.microbatches) == ("dropped", (SKIPPED,)), verdict
    assert [one.kind for one in others] == ([] if factor == 1.0 else ["tied-doubled"]), verdict
    assert verdict.undecided == (), verdict
