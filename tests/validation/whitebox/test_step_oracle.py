"""Steps in bf16 whose sums are made otherwise than a plain loop's: the reference makes them as it is told they are."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import StepResult
from pipeproof.core.verdict import Verdict
from pipeproof.reference.accumulation import Accumulation
from pipeproof.whitebox import WhiteBox

pytestmark = pytest.mark.pipeproof_ranks
WORDS, WIDTH, COUNT = 16, 8, 9  # so many microbatches that bf16 may hide one of them
BF16, FP32 = torch.bfloat16, torch.float32


class Tied(nn.Module):
    """Words go in on the first rank and come out on the last by one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.to(BF16)

    def first(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.words(x)))

    def last(self, hidden: Tensor) -> Tensor:
        return hidden @ self.words.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float().flatten(0, 1), target.flatten())


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    drawn = [torch.randint(WORDS, (2, 2, 5), generator=draw) for _ in range(COUNT)]
    return [(one[0], one[1]) for one in drawn]


@dataclass(frozen=True)
class How:
    """What the step does, and what it says that it does. lost: a microbatch of which the last rank adds nothing."""

    told: Accumulation | None
    masters: bool = False
    wide: bool = False
    late: bool = False
    lost: int | None = None
    divided: bool = True


def step(how: How, model: Tied, microbatches: list[Any]) -> StepResult:
    """A step on two ranks, each of which has a copy of the tied weight."""
    rank = dist.get_rank()
    own = nn.ModuleDict({"words": model.words} | ({} if rank else {"inner": model.inner}))
    sums: dict[str, Tensor] = {}
    losses = []
    for number, (x, target) in enumerate(microbatches):
        if rank == 0:
            y = model.first(x)
            dist.send(y.detach(), 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1)
            y.backward(gradient)
        else:
            hidden = torch.empty(*x.shape, WIDTH, dtype=BF16)
            dist.recv(hidden, 0)
            loss = loss_fn(model.last(hidden.requires_grad_()), target)
            (loss if how.late else loss / COUNT).backward()
            assert hidden.grad is not None
            dist.send(hidden.grad, 0)
            losses.append(loss.item())
        for name, parameter in own.named_parameters():
            made, parameter.grad = parameter.grad, None
            assert made is not None
            if not (rank and number == how.lost):
                made = made.float() if how.wide else made
                sums[name] = sums[name] + made if name in sums else made
    dist.all_reduce(sums["words.weight"])
    if how.late and how.divided:
        sums = {name: one / COUNT for name, one in sums.items()}
    return StepResult(own, losses or None, gradients=sums, masters=how.masters, accumulation=how.told)


def judged(whitebox: WhiteBox, how: How) -> Verdict:
    return whitebox.validate(partial(step, how), reference=Tied, microbatches=data(), ranks=2, loss_fn=loss_fn)


LATE = Accumulation(FP32, late=True)
RIGHT = {
    "copies in bf16": How(Accumulation()),
    "copies in fp32": How(Accumulation(FP32), wide=True),
    "divided late": How(LATE, wide=True, late=True),
    "copies are updated in fp32, and no optimizer is compared": How(Accumulation(), masters=True),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_is_bit_for_bit(name: str, whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, RIGHT[name])
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), str(verdict)
    assert verdict.law("gradient").checked == 4


@pytest.mark.sweep
def test_a_division_nobody_told_is_no_failure(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, How(None, wide=True, late=True))
    assert verdict.outcome in ("pass", "unknown")
    assert verdict.tier != "bitwise"


WRONG = {
    "a microbatch is lost in one copy": How(Accumulation(FP32), wide=True, lost=4),
    "a microbatch is lost in one copy, and all divided late": How(LATE, wide=True, late=True, lost=4),
    "not divided at all": How(LATE, wide=True, late=True, divided=False),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_caught(name: str, whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, WRONG[name])
    assert (verdict.outcome, verdict.law("gradient").outcome) == ("fail", "fail"), str(verdict)
    assert not verdict.unsought
