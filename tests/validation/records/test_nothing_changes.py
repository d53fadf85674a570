"""A check never changes the job: of whatever kind its state is, after many steps it has the bits that it has unchecked."""

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from zlib import crc32

import numpy
import pytest
import torch
from torch import Tensor, nn

from pipeproof.records.composed_step import Composed
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step
from tests.support import kinds_of_state
from tests.support.kinds_of_state import Kinds, Slots
from tests.support.pipeline_here import DATA, MSE, Job

STEPS = 50


class Backwards(torch.autograd.Function):
    """Moves state in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kinds: Kinds) -> Tensor:
        ctx.kinds = kinds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.kinds.move()
        return gradients[0], None


class Stage(nn.Module):
    """A layer that moves state of every kind in its forward, in its backward and in its hooks."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kinds, self.backwards, self.seen = nn.Linear(8, 8), Kinds(), Kinds(), Slots(0)
        self.register_buffer("count", torch.zeros(()))
        self.register_forward_hook(lambda *_: setattr(self.seen, "it", self.seen.it + 1))
        self.drawn: Any = None

    def forward(self, x: Tensor) -> Any:
        self.kinds.move()
        self.count += 1
        self.drawn = torch.rand(()), random.random(), numpy.random.random()
        return Backwards.apply(torch.tanh(self.layer(x)), self.backwards)  # type: ignore[no-untyped-call]  # in torch

    def read(self) -> dict[str, Any]:
        """All its state."""
        backwards = {f"{name}, in a backward": one for name, one in self.backwards.read().items()}
        more = {"hooks": self.seen.it, "buffers": self.count.item(), "drawn": str(self.drawn)}
        return self.kinds.read() | backwards | more


class Loss:
    """It counts, and raises in one of its calls."""

    def __init__(self, *, breaks_at: int = 0) -> None:
        self.kinds, self.calls, self.breaks_at = Kinds(), 0, breaks_at

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.kinds.move()
        self.calls += 1
        if self.calls == self.breaks_at:
            raise ValueError("in the midst of a check")
        return MSE(output, target)


class Counted(torch.optim.SGD):
    """All of its kind count their steps together."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        type(self).steps += 1
        return super().step(closure)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Stage(), Stage())


def doubled(name: str, stages: nn.Sequential) -> Any:
    own = {key: one.grad for key, one in stages.named_parameters()}
    return own | {name: 2 * own[name]}  # type: ignore[operator]  # it is there


def unknown(stages: nn.Sequential) -> Any:
    """Gradients of which one is a sum that its stage keeps."""
    own = {key: one.grad for key, one in stages.named_parameters()}
    return own | {"0.layer.bias": stages[0].backwards.contents["a tensor"]}  # type: ignore[union-attr]


WAYS: dict[str, tuple[Callable[[nn.Sequential, Loss, Counted], Any], Callable[[nn.Sequential], Any], str]] = {
    "composed": (lambda _, loss, optimizer: Composed(loss, optimizer=optimizer), lambda _: None, "pass"),
    "one by one": (lambda _, loss, optimizer: Composed(loss, stages="one by one"), lambda _: None, "pass"),
    "composed, wrong": (lambda _, loss, optimizer: Composed(loss), partial(doubled, "1.layer.weight"), "fail"),
    "composed, unknown": (lambda _, loss, optimizer: Composed(loss), unknown, "unknown"),
    "composed, breaks": (lambda _, loss, o: Composed(Loss(breaks_at=2)), lambda _: None, "unknown"),
    "single": (lambda _, loss, optimizer: SingleDevice(build, loss, floors=False), lambda _: None, "pass"),
    "single, wrong": (
        lambda _, loss, optimizer: SingleDevice(build, loss),
        partial(doubled, "1.layer.weight"),
        "fail",
    ),
    "single, breaks": (lambda _, loss, o: SingleDevice(build, Loss(breaks_at=2)), lambda _: None, "unknown"),
    "record": (
        lambda stages, loss, o: record_step(stages, DATA, loss_fn=loss, floors=False),
        lambda _: None,
        "pass",
    ),
    "record, wrong": (
        lambda stages, loss, o: record_step(stages, DATA, loss_fn=loss, floors=False),
        partial(doubled, "1.layer.weight"),
        "fail",
    ),
}


def run(way: str | None, steps: int) -> tuple[dict[str, Any], list[str]]:
    """What a job comes to after so many ``steps``, whose states decide what it goes on with; and the verdicts."""
    kinds_of_state.OF_THE_MODULE, Counted.steps = 0, 0
    random.seed(0)
    numpy.random.seed(0)
    stages, loss = build(), Loss()
    optimizer, verdicts = Counted(stages.parameters(), lr=0.1, momentum=0.9), list[str]()
    against = WAYS[way][0](stages, loss, optimizer) if way == "one by one" else None
    for _ in range(steps):
        job = Job([*stages], loss_fn=loss)
        if way is None:
            job.step()
        else:
            source, named, _ = WAYS[way]
            modules, by = {0: stages[0], 1: stages[1]}, against or source(stages, loss, optimizer)
            with check_step(modules, DATA, against=by, rename=lambda stage, name: f"{stage}.{name}") as check:
                losses = job.step()
                check.gradients(named(stages))
                check.report(losses=losses)
                optimizer.step()
            verdicts.append(check.verdict.verdict)
        if way is None:
            optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            stages[0].layer.bias += crc32(repr([one.read() for one in stages]).encode()) % 1000 / 1e6
    every = {f"{name} of stage {k}": one for k, stage in enumerate(stages) for name, one in stage.read().items()}
    every |= {f"{name} of the loss": one for name, one in loss.kinds.read().items()}
    more = {"weights": [one.tolist() for one in stages.parameters()], "steps": Counted.steps, "calls": loss.calls}
    return every | more | {
        "random": random.random(),
        "torch": torch.rand(2).tolist(),
        "numpy": numpy.random.rand(),
    }, verdicts


unchecked = cache(partial(run, None))


@pytest.mark.parametrize("way", WAYS)
def test_the_job_has_the_bits_that_it_has_unchecked(way: str) -> None:
    steps = STEPS
    due, _ = unchecked(steps)
    found, verdicts = run(way, steps)
    assert {name for name, one in found.items() if repr(one) != repr(due[name])} == set()
    assert {*verdicts} == {WAYS[way][2]}
