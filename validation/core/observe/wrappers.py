"""Transparent wrappers: observers and specimens override single methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from pipeproof.pipeline.gradients import GradientWork
    from pipeproof.pipeline.stage import Stage
    from pipeproof.pipeline.step import Parts, ScheduleResult
    from pipeproof.pipeline.transport import Transport


class Around:
    """Delegates to ``inner`` all that a subclass does not define."""

    inner: Any

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # a copy in the making
            raise AttributeError(name)
        return getattr(self.inner, name)


class AroundStage(Around):
    """A stage that delegates to ``inner``."""

    inner: Stage


class AroundTransport(Around):
    """A transport that delegates to ``inner``."""

    inner: Transport


class AroundGradients(Around):
    """Gradient work that delegates to ``inner``, for parameters in ``stages``."""

    inner: GradientWork

    def __init__(self, inner: GradientWork, stages: Sequence[Stage]) -> None:
        super().__init__(inner)
        self.stages = stages


Pairs = Sequence[tuple[object, object]]  # microbatches: inputs and target of each


class Steps(Protocol):
    """A ``PipelineSchedule``, or a wrapper."""

    parts: Parts

    def train_step(
        self, microbatches: Pairs, *, max_norm: float | None = None, loss_divisor: float | None = None
    ) -> ScheduleResult: ...

    def accumulate(self, microbatches: Pairs, *, loss_divisor: float | None = None) -> dict[int, Tensor]: ...

    def eval_step(self, microbatches: Pairs, *, loss_divisor: float | None = None) -> ScheduleResult: ...


class AroundSteps(Around):
    """Takes steps through ``inner``. Override ``on_data`` for inputs, ``on_result`` for results."""

    inner: Steps

    def on_data(self, operation: str, microbatches: Pairs) -> Pairs:
        """Return microbatches for an operation: "train", "accumulate" or "eval"."""
        return microbatches

    def on_result(self, operation: str, result: ScheduleResult) -> ScheduleResult:
        """Return the result of an ended "train" or "eval"."""
        return result

    def train_step(self, microbatches: Pairs, **options: float | None) -> ScheduleResult:
        return self.on_result("train", self.inner.train_step(self.on_data("train", microbatches), **options))

    def accumulate(self, microbatches: Pairs, **options: float | None) -> dict[int, Tensor]:
        return self.inner.accumulate(self.on_data("accumulate", microbatches), **options)

    def eval_step(self, microbatches: Pairs, **options: float | None) -> ScheduleResult:
        return self.on_result("eval", self.inner.eval_step(self.on_data("eval", microbatches), **options))
