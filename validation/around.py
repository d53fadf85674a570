"""Wrappers that pass everything on: observers and specimens override the one thing that they are about."""

from collections.abc import Sequence

from torch import Tensor, nn

from pipeline.boundary import Gradients, Tensors
from pipeline.gradients import GradientWork
from pipeline.stage import Goal, Stage
from pipeline.transport import Message, Transport


class AroundStage:
    """A stage that does what ``inner`` does."""

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
    """A transport that does what ``inner`` does."""

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
    """Gradient work that does what ``inner`` does, on the parameters of ``stages``."""

    def __init__(self, inner: GradientWork, stages: Sequence[Stage]) -> None:
        self.inner = inner
        self.stages = stages

    def reduce_tied(self) -> None:
        self.inner.reduce_tied()

    def squares(self) -> list[float]:
        return self.inner.squares()

    def scale(self, factor: float) -> None:
        self.inner.scale(factor)
