"""What an operation owes to those before it: new weights, cleared sums, and bits where these had them."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import StepResult, watch
from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import WIDTH, loss_fn, pairs
from tests.support.sweeps import sampled

HALF = WIDTH // 2


@dataclass(frozen=True)
class Way:
    """How a job of two ranks trains; its reference computes in bf16 where ``narrow``.

    around: one autocast is around all operations, so that its cast copies of weights outlive an update. old: these
    stages compute with the weights of the first operation. halves: from this operation on products are in two parts.
    main: gradients are added up beside ``.grad``, and handed back as copies, or as they are. clears: those are cleared.
    """

    narrow: bool = False
    around: bool = False
    old: tuple[int, ...] = ()
    halves: int = 9
    main: str = ""
    clears: bool = True
    rate: float = 0.01
    watched: bool = True


class Layer(nn.Linear):
    cut, autocast = False, False
    kept: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.kept or (self.weight, self.bias)
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
            if self.cut:
                return (x[:, :HALF] @ weight[:, :HALF].T + x[:, HALF:] @ weight[:, HALF:].T + bias).float()
            return nn.functional.linear(x, weight, bias).float()


def build(*, narrow: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Layer(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    for block in model:
        block[0].autocast = narrow
    return model


def sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


class Old(torch.autograd.Function):
    """``old`` in the place of ``new``, which gets its gradient."""

    @staticmethod
    def forward(ctx: Any, new: Tensor, old: Tensor) -> Tensor:
        return old.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def job(model: nn.Sequential, operations: Iterator[tuple[str, list[Any]]], *, way: Way) -> Iterator[Any]:
    """Each rank runs both halves, and watches and hands back its own."""
    rank, halves = dist.get_rank(), [model[:2], model[2:]]
    halves[rank] = own = watch(halves[rank]) if way.watched else halves[rank]
    optimizer, sums = sgd(model, way.rate), {name: torch.zeros_like(one) for name, one in own.named_parameters()}
    first = [(block[0].weight.detach().clone(), block[0].bias.detach().clone()) for block in model]
    for number, (operation, microbatches) in enumerate(operations):
        for k, (block, kept) in enumerate(zip(model, first, strict=True)):
            block[0].cut, block[0].autocast = number >= way.halves, way.narrow and not way.around
            if number and k // 2 in way.old:
                now = block[0].weight, block[0].bias
                block[0].kept = tuple(Old.apply(new, old) for new, old in zip(now, kept, strict=True))
        optimizer.zero_grad()
        losses = []
        for x, target in microbatches:
            with torch.set_grad_enabled(operation != "eval"):
                loss = loss_fn(halves[1](halves[0](x)), target)
            losses.append(loss.item())
            if operation != "eval":
                (loss / len(microbatches)).backward()
        for name, one in own.named_parameters() if way.main and operation != "eval" else ():
            sums[name] += one.grad
            one.grad = sums[name].clone()
        if operation == "train":
            optimizer.step()
        handed = {name: one.clone() if way.main == "copies" else one for name, one in sums.items()}
        yield StepResult(own, losses if rank else [], gradients=handed if way.main else None)
        for one in sums.values() if way.clears else ():
            one.zero_()


def judged(whitebox: WhiteBox, way: Way, steps: list[str]) -> Verdict:
    def step(model: nn.Sequential, operations: Iterator[tuple[str, list[Any]]]) -> Iterator[Any]:
        with torch.autocast("cpu", torch.bfloat16) if way.around else nullcontext():
            yield from job(model, operations, way=way)

    make = partial(sgd, rate=way.rate)
    wanted = {"reference": partial(build, narrow=way.narrow), "ranks": 2, "loss_fn": loss_fn, "optimizer": make}
    return whitebox.validate(step, microbatches=pairs(3 * len(steps)), contract=Contract(operations=steps), **wanted)


TRAIN, EVAL = ["train", "train"], ["train", "eval"]
NARROW = Way(narrow=True)
RIGHT = {
    "bf16": (NARROW, TRAIN, "bitwise"),
    "other kernels in fp32 after bits": (Way(halves=1), TRAIN, "fp32"),
    "an evaluation in bf16 by other kernels": (Way(narrow=True, halves=0), EVAL, "bf16"),
    "sums beside .grad": (Way(main="as they are"), TRAIN, "bitwise"),
    "sums that an evaluation leaves": (Way(main="as they are", clears=False), EVAL, "bitwise"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", sampled(RIGHT, 2))
def test_what_is_right_passes(whitebox: WhiteBox, name: str) -> None:
    way, steps, tier = RIGHT[name]
    verdict = judged(whitebox, way, steps)
    assert (verdict.outcome, verdict.tier) == ("pass", tier), str(verdict)


AROUND = Way(narrow=True, around=True)
WRONG = {
    "a cast that outlives a small update": (AROUND, TRAIN, "stale-tensor", None),
    "unwatched": (Way(narrow=True, around=True, watched=False), TRAIN, "stale-tensor", None),
    "in an evaluation": (AROUND, EVAL, "stale-tensor", None),
    "a large one": (Way(narrow=True, around=True, rate=0.5), TRAIN, "stale-tensor", None),
    "old weights in fp32": (Way(old=(0, 1)), TRAIN, "stale-tensor", None),
    "in one stage": (Way(old=(1,)), TRAIN, "stale-tensor", 1),
    "two operations later": (Way(old=(0,)), ["train", "eval", "train"], "stale-tensor", 0),
    "sums that are not cleared": (Way(main="as they are", clears=False), TRAIN, "stale-gradient", None),
    "handed back as copies": (Way(main="copies", clears=False), TRAIN, "stale-gradient", None),
    "before an accumulation": (
        Way(main="as they are", clears=False),
        ["train", "accumulate", "train"],
        "stale-gradient",
        None,
    ),
}


@pytest.mark.parametrize("name", sampled(WRONG, 3))
def test_what_an_operation_left_is_found_and_named(whitebox: WhiteBox, name: str) -> None:
    way, steps, kind, stage = WRONG[name]
    verdict = judged(whitebox, way, steps)
    assert verdict.outcome == "fail", str(verdict)
    assert [(one.kind, one.stage) for one in verdict.causes] == [(kind, stage)], str(verdict)
    if kind == "stale-tensor":
        golden(verdict.causes[0].detail, numbers=False)


@pytest.mark.sweep
def test_other_kernels_in_bf16_after_bits_are_no_proof_and_no_pass(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, Way(narrow=True, halves=1), EVAL)
    assert (verdict.outcome, verdict.law("loss").outcome, verdict.causes) == ("unknown", "unknown", ()), str(verdict)
