"""Transparent wrappers: observers and specimens override single methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipeproof.pipeline.boundary import Gradients, Tensors
    from pipeproof.pipeline.gradients import GradientWork
    from pipeproof.pipeline.stage import Goal, Stage
    from pipeproof.pipeline.step import Parts, ScheduleResult
    from pipeproof.pipeline.transport import Message, Transport


class AroundStage:
    """A stage that delegates to ``inner``."""

    def __init__(self, inner: Stage) -> None:
        self.inner = inner

    @property
    def index(self) -> int:
        return self.inner.index

    @property
    def module(self) -> nn.Module:
        return self.inner.module

    @property
    def losses(self) -> dict[int, Tensor]:
        return self.inner.losses

    def begin(self) -> None:
        self.inner.begin()

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        return self.inner.forward(microbatch, inputs, goal)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        return self.inner.backward(microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        return self.inner.backward_input(microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        self.inner.backward_weight(microbatch)


class AroundTransport:
    """A transport that delegates to ``inner``."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def n_ranks(self) -> int:
        return self.inner.n_ranks

    @property
    def in_order(self) -> bool:
        return self.inner.in_order

    def send(self, message: Message, buffer: Tensor) -> None:
        self.inner.send(message, buffer)

    def post(self, message: Message, nbytes: int) -> None:
        self.inner.post(message, nbytes)

    def receive(self, message: Message) -> Tensor:
        return self.inner.receive(message)

    def flush(self) -> None:
        self.inner.flush()


class AroundGradients:
    """Gradient work that delegates to ``inner``, for parameters in ``stages``."""

    def __init__(self, inner: GradientWork, stages: Sequence[Stage]) -> None:
        self.inner = inner
        self.stages = stages

    def reduce_tied(self) -> None:
        self.inner.reduce_tied()

    def squares(self) -> list[float]:
        return self.inner.squares()

    def scale(self, factor: float) -> None:
        self.inner.scale(factor)


Pairs = Sequence[tuple[object, object]]  # microbatches: inputs and target of each


class Steps(Protocol):
    """A ``PipelineSchedule``, or a wrapper."""

    parts: Parts

    def train_step(
        self, microbatches: Pairs, *, max_norm: float | None = None, loss_divisor: float | None = None
    ) -> ScheduleResult: ...

    def accumulate(self, microbatches: Pairs, *, loss_divisor: float | None = None) -> dict[int, Tensor]: ...

    def eval_step(self, microbatches: Pairs, *, loss_divisor: float | None = None) -> ScheduleResult: ...


class AroundSteps:
    """Takes steps through ``inner``. Override ``on_data`` for inputs, ``on_result`` for results."""

    def __init__(self, inner: Steps) -> None:
        self.inner = inner
        self.parts = inner.parts

    def on_data(self, operation: str, microbatches: Pairs) -> Pairs:
        """Return microbatches for an operation: "train", "accumulate" or "eval"."""
        return microbatches

    def on_result(self, operation: str, result: ScheduleResult) -> ScheduleResult:
        """Return the result of an ended "train" or "eval"."""
        return result

    def train_step(
        self, microbatches: Pairs, *, max_norm: float | None = None, loss_divisor: float | None = None
    ) -> ScheduleResult:
        given = self.on_data("train", microbatches)
        return self.on_result("train", self.inner.train_step(given, max_norm=max_norm, loss_divisor=loss_divisor))

    def accumulate(self, microbatches: Pairs, *, loss_divisor: float | None = None) -> dict[int, Tensor]:
        return self.inner.accumulate(self.on_data("accumulate", microbatches), loss_divisor=loss_divisor)

    def eval_step(self, microbatches: Pairs, *, loss_divisor: float | None = None) -> ScheduleResult:
        given = self.on_data("eval", microbatches)
        return self.on_result("eval", self.inner.eval_step(given, loss_divisor=loss_divisor))
