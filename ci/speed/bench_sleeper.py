"""A stage that sleeps instead of computing: so long in the forward, in the input's and in the weight's backward."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from pipeproof.pipeline import Kind
from pipeproof.pipeline.boundary import Gradients, Tensors
from pipeproof.pipeline.stage import Goal, ModuleStage, Stage

UNIT_S = 5e-3  # what each of F, I and W of a microbatch lasts on a rank; a stage takes its share
_PROBE_S = UNIT_S / 2
_OFF = 0.5  # how far, as a share, the median duration of an action may be from what it is to be


class Sleeps(NamedTuple):
    """How long to sleep in a forward, and in each half of a backward."""

    forward_s: float
    half_s: float

    def shortened(self, excess: "Sleeps") -> "Sleeps":
        """These sleeps, each less what its action takes beyond it."""
        return Sleeps(self.forward_s - excess.forward_s, self.half_s - excess.half_s)


def excess(*, repeats: int = 200) -> Sleeps:
    """What F, and half a B, take longer than their sleeps where a stage runs alone: medians.

    A sleep ends late, by what depends on the machine, and autograd takes its time too. Neither depends on the length.
    """
    taken: list[tuple[float, float]] = []
    module, x = Sleeper(Sleeps(_PROBE_S, _PROBE_S)), torch.ones(8, 8, requires_grad=True)
    for _ in range(repeats):
        began = time.perf_counter()
        y = module(x)
        between = time.perf_counter()
        y.backward(torch.ones_like(y))
        taken.append((between - began, time.perf_counter() - between))
    forward_s, backward_s = map(median, zip(*taken, strict=True))
    return Sleeps(forward_s - _PROBE_S, backward_s / 2 - _PROBE_S)


class _SleepBack(torch.autograd.Function):
    """The identity, with a sleep in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()  # torch takes no view for what a stage hands on, if its backward is to be split

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    """A stage with one parameter, whose F, I and W each sleep.

    An autograd.Function that sees a parameter cannot be cut in two, so there are two: one on the way from the output
    to the input, one on a branch that leads to the parameter alone, which it sees as the product of a torch call.
    """

    def __init__(self, sleeps: Sleeps) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._sleeps = sleeps

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._sleeps.forward_s)
        weight = _SleepBack.apply(self.weight.view_as(self.weight), self._sleeps.half_s)
        return _SleepBack.apply(x * weight, self._sleeps.half_s)


class Watched:
    """A stage that notes how long each of its actions took."""

    def __init__(self, stage: Stage, seconds: dict[str, list[float]]) -> None:
        self._stage = stage
        self._seconds = seconds
        self.index, self.module, self.begin = stage.index, stage.module, stage.begin

    @property
    def losses(self) -> dict[int, Tensor]:
        return self._stage.losses

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        return self._timed(Kind.FORWARD, self._stage.forward, microbatch, inputs, goal)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        return self._timed(Kind.BACKWARD, self._stage.backward, microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        return self._timed(Kind.BACKWARD_INPUT, self._stage.backward_input, microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        self._timed(Kind.BACKWARD_WEIGHT, self._stage.backward_weight, microbatch)

    def _timed(self, kind: Kind, act: Callable[..., Any], *args: object) -> Any:
        began = time.perf_counter()
        result = act(*args)
        self._seconds.setdefault(kind.value, []).append(time.perf_counter() - began)
        return result


def halves(sleeps: Sleeps, *, repeats: int = 9) -> dict[str, float]:
    """The seconds of both halves of a ``Sleeper``'s backward, as we split it and as torch does: medians, alone."""
    taken = [(*_ours(sleeps), *_torchs(sleeps)) for _ in range(repeats)]
    names = ("our I", "our W", "torch's I", "torch's W")
    return dict(zip(names, map(median, zip(*taken, strict=True)), strict=True))


def _ours(sleeps: Sleeps) -> tuple[float, float]:
    stage, x = ModuleStage(Sleeper(sleeps), 0, splits=True), torch.ones(8, 8, requires_grad=True)
    (y,) = stage.forward(0, (x,), None)
    began = time.perf_counter()
    stage.backward_input(0, (torch.ones_like(y),))
    between = time.perf_counter()
    stage.backward_weight(0)
    assert not stage.undeferred, f"a sleep that belongs to W came early: {stage.undeferred}"
    return between - began, time.perf_counter() - between


def _torchs(sleeps: Sleeps) -> tuple[float, float]:
    module, x = Sleeper(sleeps), torch.ones(8, 8, requires_grad=True)
    y = module(x)
    began = time.perf_counter()
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], module.parameters())
    between = time.perf_counter()
    stage_backward_weight(module.parameters(), groups)
    return between - began, time.perf_counter() - between


def assert_lasted(seconds: Mapping[str, float], unit_s: float) -> None:
    """Every kind of action took about as long as it should: a B as long as I and W together."""
    for kind, taken in seconds.items():
        expected = unit_s * (2 if kind == Kind.BACKWARD.value else 1)
        assert abs(taken - expected) <= _OFF * expected, (
            f"{kind} took {taken * 1e3:.2f} ms: expected about {expected * 1e3:.2f} ms"
        )
