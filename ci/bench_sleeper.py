"""A stage that sleeps instead of computing: so long in the forward, in the input's and in the weight's backward."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from pipeline import Kind
from pipeline.boundary import Gradients, Tensors
from pipeline.stage import Goal, ModuleStage, Stage

UNIT_S = 5e-3  # of a rank, for each of F, I and W of a microbatch; a stage takes its share
_SPLIT = frozenset({Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
_OFF = 0.5  # how far, as a share, the median duration of an action may be above the time it is to sleep


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
    """A stage with one parameter, whose F, I and W each sleep for ``seconds``.

    An autograd.Function that sees a parameter cannot be cut in two, so there are two: one on the way from the output
    to the input, one on a branch that leads to the parameter alone, which it sees as the product of a torch call.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._seconds)
        weight = _SleepBack.apply(self.weight.view_as(self.weight), self._seconds)
        return _SleepBack.apply(x * weight, self._seconds)


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


class Halves(NamedTuple):
    """The seconds of a split backward's two halves."""

    input_s: float
    weight_s: float


def halves(repeats: int = 9) -> dict[str, Halves]:
    """Ours and torch's split backward of one ``Sleeper``, timed in this process: the medians."""
    return {
        name: Halves(*map(median, zip(*(split() for _ in range(repeats)), strict=True)))
        for name, split in {"ours": _ours, "torch": _torchs}.items()
    }


def _ours() -> Halves:
    stage, x = ModuleStage(Sleeper(UNIT_S), 0, splits=True), torch.ones(8, 8, requires_grad=True)
    (y,) = stage.forward(0, (x,), None)
    began = time.perf_counter()
    stage.backward_input(0, (torch.ones_like(y),))
    between = time.perf_counter()
    stage.backward_weight(0)
    assert not stage.undeferred, f"a sleep that belongs to W came early: {stage.undeferred}"
    return Halves(between - began, time.perf_counter() - between)


def _torchs() -> Halves:
    module, x = Sleeper(UNIT_S), torch.ones(8, 8, requires_grad=True)
    y = module(x)
    began = time.perf_counter()
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], module.parameters())
    between = time.perf_counter()
    stage_backward_weight(module.parameters(), groups)
    return Halves(between - began, time.perf_counter() - between)


def assert_slept(seconds: Mapping[str, Sequence[float]], unit_s: float) -> None:
    """Every kind of action slept as long as it should: a B as long as I and W together."""
    for kind, taken in seconds.items():
        due, middle = unit_s * (2 if kind == Kind.BACKWARD.value else 1), median(taken)
        assert due <= middle <= due * (1 + _OFF), f"{kind} took {middle * 1e3:.2f} ms: expected {due * 1e3:.2f} ms"
