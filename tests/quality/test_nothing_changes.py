"""A check never changes the job: of whatever kind its state is, it goes on with the bits that it has unchecked."""

import random
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any
from zlib import crc32

import numpy
import pytest
import torch
from torch import Tensor, nn

from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import check_step
from pipeproof.records.step_record import record_step
from pipeproof.reference.snapshot import Snapshot
from pipeproof.wings.composed import StageByStage
from tests.support import kinds_of_state
from tests.support.golden import golden
from tests.support.kinds_of_state import CONTENTS, HOLDERS, Kinds, Slots, naturals
from tests.support.pipeline_here import DATA, MSE, Job
from tests.support.sweeps import SWEEP

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
        self.layer, self.kinds, self.backwards, self.observed = nn.Linear(8, 8), Kinds(), Kinds(), Slots(0)
        self.register_buffer("count", torch.zeros(()))
        self.register_forward_hook(lambda *_: setattr(self.observed, "it", self.observed.it + 1))
        self.drawn: Any = None

    def forward(self, x: Tensor) -> Any:
        self.kinds.move()
        self.count += 1
        self.drawn = torch.rand(()), random.random(), numpy.random.random()
        return Backwards.apply(torch.tanh(self.layer(x)), self.backwards)  # type: ignore[no-untyped-call]  # in torch

    def read(self) -> dict[str, Any]:
        """All its state."""
        backwards = {f"{name}, in a backward": one for name, one in self.backwards.read().items()}
        more = {"hooks": self.observed.it, "buffers": self.count.item(), "drawn": str(self.drawn)}
        return self.kinds.read() | backwards | more


class Loss:
    """It counts, and raises in one of its calls."""

    def __init__(self, *, raises_at: int = 0) -> None:
        self.kinds, self.calls, self.raises_at = Kinds(), 0, raises_at

    @cached_property
    def raising(self) -> "Loss":
        """Another one, which raises."""
        return Loss(raises_at=2)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.kinds.move()
        self.calls += 1
        if self.calls == self.raises_at:
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


def recorded(stages: nn.Sequential, loss: Loss, optimizer: Counted) -> Any:
    """A record of the step that comes next, made within the job."""
    return record_step(stages, DATA, loss_fn=loss, floors=False)


def unknown(stages: nn.Sequential) -> Any:
    """Gradients of which one is a sum that its stage keeps."""
    own = {key: one.grad for key, one in stages.named_parameters()}
    return own | {"0.layer.bias": stages[0].backwards.contents["a tensor"]}  # type: ignore[union-attr]


def of_autograd(stages: nn.Sequential) -> None:
    """Those that are there."""


def wrong(stages: nn.Sequential) -> Any:
    """Gradients of which one is twice what it should be."""
    own = {key: one.grad for key, one in stages.named_parameters()}
    return own | {"1.layer.weight": own["1.layer.weight"] * 2}  # type: ignore[operator]  # it is there


# By name: what a step is held against, the gradients that are handed over, and the verdict.
WAYS: dict[str, tuple[Callable[[nn.Sequential, Loss, Counted], Any], Callable[[nn.Sequential], Any], str]] = {
    "composed": (lambda _, loss, optimizer: StageByStage(loss, optimizer=optimizer), of_autograd, "pass"),
    "one by one": (lambda _, loss, optimizer: StageByStage(loss, stages="one by one"), of_autograd, "pass"),
    "composed, wrong": (lambda _, loss, optimizer: StageByStage(loss), wrong, "fail"),
    "composed, unknown": (lambda _, loss, optimizer: StageByStage(loss), unknown, "unknown"),
    "composed, raises": (lambda _, loss, optimizer: StageByStage(loss.raising), of_autograd, "unknown"),
    "single": (lambda _, loss, optimizer: SingleDevice(build, loss, floors=False), of_autograd, "pass"),
    "single, wrong": (lambda _, loss, optimizer: SingleDevice(build, loss, floors=False), wrong, "fail"),
    "single, raises": (lambda _, loss, optimizer: SingleDevice(build, loss.raising), of_autograd, "unknown"),
    "record": (recorded, of_autograd, "pass"),
    "record, wrong": (recorded, wrong, "fail"),
}


def run(ways: Sequence[str], steps: int) -> tuple[dict[str, Any], list[str]]:
    """What a job comes to after so many ``steps``, checked in these ways in turn; with the verdicts.

    What its steps leave in its state decides what it goes on with.
    """
    kinds_of_state.OF_THE_MODULE, Counted.steps = 0, 0
    random.seed(0)
    numpy.random.seed(0)
    stages, loss = build(), Loss()
    assert loss.raising, "it is made before the job begins"
    optimizer, verdicts = Counted(stages.parameters(), lr=0.1, momentum=0.9), list[str]()
    for k in range(steps):
        job = Job([*stages], loss_fn=loss)
        if not ways:
            job.step()
            optimizer.step()
        else:
            source, named, _ = WAYS[ways[k % len(ways)]]
            modules, by = dict(enumerate(stages)), source(stages, loss, optimizer)
            with check_step(modules, DATA, against=by, rename=lambda stage, name: f"{stage}.{name}") as check:
                losses = job.step()
                check.gradients(named(stages))
                check.report(losses=losses)
                optimizer.step()
            verdicts.append(check.verdict.outcome)
        optimizer.zero_grad()
        with torch.no_grad():
            stages[0].layer.bias += crc32(repr([one.read() for one in stages]).encode()) % 1000 / 1e6
    found = {f"{name} of stage {k}": one for k, stage in enumerate(stages) for name, one in stage.read().items()}
    found |= {f"{name} of the loss": one for name, one in loss.kinds.read().items()}
    found |= {"weights": [one.tolist() for one in stages.parameters()], "steps": Counted.steps, "calls": loss.calls}
    drawn = random.random(), torch.rand(2).tolist(), numpy.random.rand()
    return {name: repr(one) for name, one in (found | {"drawn": drawn}).items()}, verdicts


unchecked = cache(partial(run, ()))


@pytest.mark.parametrize("ways", [[*WAYS], *(pytest.param([way], marks=SWEEP) for way in WAYS)], ids="+".join)
def test_the_job_has_the_bits_that_it_has_unchecked(ways: list[str]) -> None:
    expected, _ = unchecked(STEPS)
    found, verdicts = run(ways, STEPS)
    assert {name for name, one in found.items() if one != expected[name]} == set()
    assert verdicts == [WAYS[ways[k % len(ways)]][2] for k in range(STEPS)]


def test_a_check_that_puts_nothing_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind, so that the test above can fail for each."""
    monkeypatch.setattr(Snapshot, "put_back", lambda self: None)
    expected, _ = run((), 1)
    found, _ = run(["composed"], 1)
    same = {name for name, one in found.items() if one == expected[name]}
    assert not {name for name in same if any(name.startswith(kind) for kind in (*CONTENTS, *HOLDERS))}


class Drawing(nn.Module):
    """Moves what nobody can set."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.numbers = nn.Linear(8, 8), naturals()

    def forward(self, x: Tensor) -> Any:
        next(self.numbers)
        return self.layer(x)


def test_what_cannot_be_put_back_is_unknown_and_named() -> None:
    stage = Drawing()
    with check_step({0: stage}, DATA, against=StageByStage(MSE)) as check:
        Job([stage]).step()
        check.gradients()
    assert check.verdict.outcome == "unknown"
    golden(check.verdict.details.splitlines()[0])


class Cached(nn.Module):
    """Adds to what it is given, which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Slots) -> Any:
        cache.it = cache.it + 1
        return self.layer(x)


def test_what_a_call_is_given_is_put_back() -> None:
    stage, cache = Cached(), Slots(0)
    more: Any = {"cache": cache}
    with check_step({0: stage}, DATA, against=StageByStage(MSE)) as check:
        Job([stage], more=lambda stage, m: more).step()
        check.gradients()
    assert cache.it == len(DATA)


class Shrinking(nn.Module):
    """Writes to its own weights when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        self.layer.weight.data.mul_(0.9)
        return self.layer(x)


def test_weights_that_a_stage_writes_to_are_put_back() -> None:
    stage = Shrinking()
    with check_step({0: stage}, DATA, against=StageByStage(MSE)) as check:
        Job([stage]).step()
        before, version = stage.layer.weight.detach().clone(), stage.layer.weight._version
        check.gradients()
    assert torch.equal(stage.layer.weight, before)
    assert stage.layer.weight._version == version
    assert check.verdict.outcome != "pass"
