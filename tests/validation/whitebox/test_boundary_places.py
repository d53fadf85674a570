"""Gradients at the boundaries of replicas' stages, and a stage with several inputs: what each is and should be."""

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
from tests.support.steps import blocks, loss_fn, pairs


def step(model: Any, microbatches: list[Any], *, times: float, each: bool) -> Any:
    """Two stages by two replicas; what the second stage hands on is multiplied.

    ``each``: a replica divides by its own microbatches, and replicas are averaged; else by all, and they are summed.
    """
    rank = dist.get_rank()
    number, replica = rank // 2, rank % 2
    groups = [dist.new_group([2 * k, 2 * k + 1]) for k in range(2)]
    stage, count = watch(model[2 * number : 2 * number + 2]), len(microbatches) * (1 if each else 2)
    losses = []
    for x, target in microbatches:
        if number == 0:
            made = stage(x)
            dist.send(made.detach(), replica + 2)
            gradient = torch.empty_like(made)
            dist.recv(gradient, replica + 2)
            made.backward(gradient)
        else:
            given = torch.empty_like(x)
            dist.recv(given, replica)
            loss = loss_fn(stage(given.requires_grad_()), target)
            (loss / count).backward()
            assert given.grad is not None
            dist.send(times * given.grad, replica)
            losses.append(loss.item())
    for parameter in stage.parameters():
        dist.all_reduce(parameter.grad, group=groups[number])
        parameter.grad /= 2 if each else 1
    return stage, losses or None


@pytest.mark.sweep
@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("times", [1.0, 0.5, 2.0])
def test_gradients_have_one_scale(whitebox: WhiteBox, times: float, each: bool) -> None:
    """All are those of a replica, or all are those of the whole step: anything else is a factor."""
    verdict = whitebox.validate(
        partial(step, times=times, each=each),
        reference=partial(nn.Sequential, *blocks()),
        microbatches=pairs(4),
        ranks={"pp": 2, "dp": 2},
        loss_fn=loss_fn,
    )
    assert (verdict.outcome, verdict.law("boundaries").outcome == "pass") == (
        ("pass", True) if times == 1 else ("fail", False)
    ), verdict
    causes = [(one.kind, one.stage, one.factor) for one in verdict.causes]
    assert causes == [("scale", 0, pytest.approx(times))] * (times != 1)
    assert all(f"{times:g} times the expected" in one.detail for one in verdict.causes)
    assert "wrong-message" not in {kind for one in verdict.ruled_out for kind in one.kinds}


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


def build_masked() -> Masked:
    torch.manual_seed(3)
    return Masked()


def data() -> list[Any]:
    made = torch.Generator().manual_seed(7)
    x, target = torch.randn(2, COUNT, 3, WIDTH, generator=made)
    masks = torch.randint(0, 2, (COUNT, 3, 1), generator=made)
    masks[:, 0] = 0
    return [((one, mask), goal) for one, mask, goal in zip(x, masks, target, strict=True)]


def masked(model: Any, microbatches: list[Any], *, change: Change, mask_first: bool) -> Any:
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


CHANGES: dict[str, Change] = {
    "right": lambda came, mask: (came, mask),
    "another input": lambda came, mask: (came.mul_(1.01), mask),
    "no mask": lambda came, mask: (came, torch.ones_like(mask)),
}


@pytest.mark.parametrize(
    ("change", "mask_first"),
    [("right", False), ("right", True), ("another input", False), ("another input", True), ("no mask", False)],
)
def test_inputs_are_known_wherever_they_are_passed(whitebox: WhiteBox, change: str, mask_first: bool) -> None:
    """What the stage before hands on, and the model's own input: a message is blamed where there was one."""
    run = partial(masked, change=CHANGES[change], mask_first=mask_first)
    verdict = whitebox.validate(run, reference=build_masked, microbatches=data(), ranks=2, loss_fn=loss_fn)
    causes = [(one.kind, one.rank, one.stage, one.action) for one in verdict.causes]
    assert causes == [("altered", 1, 1, "1F0")] * (change != "right"), str(verdict)
    assert (verdict.outcome == "pass") == (change == "right")
    for cause in verdict.causes:
        golden(cause.detail)
        assert any(line.what.startswith("sent by") for line in cause.lines) == (change == "another input"), verdict
