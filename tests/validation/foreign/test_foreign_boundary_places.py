"""A stage with several inputs: what each of them is, where its content does not tell it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.core.verdict import Verdict
from pipeproof.foreign import WhiteBox, watch
from tests.support.golden import golden
from tests.support.steps import loss_fn

WIDTH, COUNT = 8, 4
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Part(nn.Module):
    """One layer, whose output is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * mask


class Masked(nn.Module):
    """Two parts, each of which takes the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x, mask)
        return x


class Turned(nn.Module):
    """A part that takes its mask first."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, mask: Tensor, x: Tensor) -> Any:
        return self.part(x, mask)


def build() -> Masked:
    torch.manual_seed(3)
    return Masked()


def data() -> list[Any]:
    made = torch.Generator().manual_seed(7)
    x, target = torch.randn(2, COUNT, 3, WIDTH, generator=made)
    masks = torch.randint(0, 2, (COUNT, 3, 1), generator=made)
    masks[:, 0] = 0
    return [((one, mask), goal) for one, mask, goal in zip(x, masks, target, strict=True)]


def step(model: Any, microbatches: list[Any], *, change: Change, mask_first: bool) -> Any:
    """Two ranks; ``change`` is made to what the second stage is given."""
    rank, losses = dist.get_rank(), []
    stage = Turned(model.parts[1]) if rank and mask_first else model.parts[rank]
    watch(stage)
    for (x, mask), target in microbatches:
        if rank == 0:
            made = stage(x, mask)
            dist.send(made.detach(), 1)
            gradient = torch.empty_like(made)
            dist.recv(gradient, 1)
            made.backward(gradient)
            continue
        came = torch.empty_like(x)
        dist.recv(came, 0)
        came, mask = change(came, mask)
        given = (came.requires_grad_(), mask)
        loss = loss_fn(stage(*(given[::-1] if mask_first else given)), target)
        (loss / COUNT).backward()
        dist.send(came.grad, 0)
        losses.append(loss.item())
    return stage, losses


def judged(whitebox: WhiteBox, change: Change, *, mask_first: bool) -> Verdict:
    run = partial(step, change=change, mask_first=mask_first)
    return whitebox.validate(run, reference=build, microbatches=data(), ranks=2, loss_fn=loss_fn)


def test_what_the_stage_before_hands_on_is_known_wherever_it_is_passed(whitebox: WhiteBox) -> None:
    for mask_first in (False, True):
        verdict = judged(whitebox, lambda came, mask: (came.mul_(1.01), mask), mask_first=mask_first)
        (cause,) = verdict.cause
        assert (cause.kind, cause.rank, cause.stage, cause.action) == ("altered", 1, 1, "1F0"), str(verdict)
        golden(cause.detail)
        assert any(own.what.startswith("sent by") for own in cause.lines), str(verdict)


def test_a_mask_that_is_lost_is_known_as_the_models_input_and_no_message_is_blamed(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, lambda came, mask: (came, torch.ones_like(mask)), mask_first=False)
    (cause,) = verdict.cause
    assert (cause.kind, cause.rank, cause.stage, cause.action) == ("altered", 1, 1, "1F0"), str(verdict)
    golden(cause.detail, numbers=False)
    assert not any(own.what.startswith("sent by") for own in cause.lines), str(verdict)


def test_right_masks_pass_wherever_they_are_passed(whitebox: WhiteBox) -> None:
    for mask_first in (False, True):
        verdict = judged(whitebox, lambda came, mask: (came, mask), mask_first=mask_first)
        assert verdict.verdict == "pass", str(verdict)
