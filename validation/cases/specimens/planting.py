"""What many specimens are made of: places in a pipeline, and wrappers that change one thing there."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeline.action import Action
from pipeline.boundary import Gradients
from pipeline.gradients import GradientWork
from pipeline.schedule import Schedule
from pipeline.stage import Stage
from pipeline.step import Parts, StepResult
from pipeline.transport import Message, Transport
from validation.cases.specimens.specimen import Plant, StageAt
from validation.observers.wrappers import AroundGradients, AroundStage, AroundSteps, AroundTransport, Pairs

SMALLEST = "naive r1 s1 m{m} split=1 model={model} plan={plan} seed=0"
ONE = "naive r1 s1 m1 split=1 model=mlp plan=train seed=0"
ONE_OF_TWO = "naive r1 s1 m2 split=1 model=mlp plan=train seed=0"
TWO_STAGES = "naive r2 s2 m1 split=1,1 model=mlp plan=train seed=0"
TWO_OF_TWO = "naive r2 s2 m2 split=1,1 model=mlp plan=train seed=0"

Change = Callable[[nn.Module], None]


def first(n_stages: int) -> int:
    """The first stage."""
    return 0


def second(n_stages: int) -> int:
    """The second stage, or the only one."""
    return min(1, n_stages - 1)


def middle(n_stages: int) -> int:
    """The stage in the middle."""
    return n_stages // 2


def last(n_stages: int) -> int:
    """The last stage."""
    return n_stages - 1


def on_stages(wrap: Callable[[Stage, Schedule], Stage], place: StageAt | None = None) -> Plant:
    """Wrap the stage at ``place``, or every stage."""

    def plant(parts: Parts) -> Parts:
        schedule = parts.program.schedule
        at = None if place is None else place(schedule.n_stages)
        stages = tuple(wrap(stage, schedule) if at in (None, stage.index) else stage for stage in parts.stages)
        return replace(parts, stages=stages)

    return plant


def on_modules(change: Change, place: StageAt | None = None) -> Plant:
    """Change the module of the stage at ``place``, or of every stage, once, before the first step."""

    def plant(parts: Parts) -> Parts:
        for stage in parts.stages:
            if place is None or stage.index == place(parts.program.schedule.n_stages):
                change(stage.module)
        return parts

    return plant


def on_gradients(change: Change, place: StageAt | None = None, *, clipped: bool = False) -> Plant:
    """Change a module's gradients after the last backward; or, if ``clipped``, after clipping: seen by the optimizer
    alone."""
    return on_work(lambda parts: _ChangedGradients(parts, change, place, clipped=clipped))


def on_work(wrap: Callable[[Parts], GradientWork]) -> Plant:
    """Wrap the gradient work."""
    return lambda parts: replace(parts, gradients=wrap(parts))


def on_transport(wrap: Callable[[Transport, Schedule], Transport]) -> Plant:
    """Wrap the transport."""
    return lambda parts: replace(parts, transport=wrap(parts.transport, parts.program.schedule))


def both(*plants: Plant) -> Plant:
    """One plant after the other."""

    def plant(parts: Parts) -> Parts:
        for one in plants:
            parts = one(parts)
        return parts

    return plant


class Around(AroundGradients):
    """Gradient work around that of ``parts``."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.gradients, parts.stages)


class _ChangedGradients(Around):
    def __init__(self, parts: Parts, change: Change, place: StageAt | None, *, clipped: bool) -> None:
        super().__init__(parts)
        n_stages = parts.program.schedule.n_stages
        self._modules = [s.module for s in parts.stages if place is None or s.index == place(n_stages)]
        self._change = change
        self._clipped = clipped

    def reduce_tied(self) -> None:
        if not self._clipped:
            self._all()
        self.inner.reduce_tied()

    def scale(self, factor: float) -> None:
        self.inner.scale(factor)
        if self._clipped:
            self._all()

    def _all(self) -> None:
        for module in self._modules:
            self._change(module)


class MovedTwice(AroundSteps):
    """An optimizer without state, or in its first step, moves ``moved()`` at twice the rate."""

    def moved(self) -> list[nn.Parameter]:
        """This rank's parameters that are concerned."""
        raise NotImplementedError

    def given(self, operation: str, microbatches: Pairs) -> Pairs:
        self._before = {parameter: parameter.detach().clone() for parameter in self.moved()}
        return microbatches

    @torch.no_grad()
    def told(self, operation: str, result: StepResult) -> StepResult:
        for parameter, before in self._before.items() if operation == "train" else ():
            parameter.add_(parameter - before)
        return result


class Times(AroundStage):
    """A stage that adds microbatch m's share to its gradients ``times[m]`` times: 0 drops it, 2 doubles it.

    ``whole`` and ``halves``: whether that is so of whole backwards, and of second halves.
    """

    def __init__(self, inner: Stage, times: Mapping[int, float], *, whole: bool = True, halves: bool = True) -> None:
        super().__init__(inner)
        self._times = times
        self._whole = whole
        self._halves = halves

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        with self._counted(microbatch, self._whole):
            return self.inner.backward(microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        with self._counted(microbatch, self._halves):
            self.inner.backward_weight(microbatch)

    @contextmanager
    def _counted(self, microbatch: int, concerned: bool) -> Iterator[None]:
        factor = self._times.get(microbatch, 1.0) if concerned else 1.0
        if factor == 1.0:
            yield
            return
        before = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        for parameter, _ in before:
            parameter.grad = None
        yield
        for parameter, sum_ in before:
            share, parameter.grad = parameter.grad, sum_
            if share is not None and factor != 0.0:
                parameter.grad = share * factor if sum_ is None else sum_ + share * factor


class Arriving(AroundTransport):
    """A transport that changes what arrives between stages: ``change`` is given the action and the bytes."""

    def __init__(self, inner: Transport, schedule: Schedule) -> None:
        super().__init__(inner)
        self.schedule = schedule

    def receive(self, message: Message) -> Tensor:
        arrived = self.inner.receive(message)
        return self.change(message.name, arrived) if isinstance(message.name, Action) else arrived

    def change(self, action: Action, arrived: Tensor) -> Tensor:
        """What the stage is given."""
        return arrived


def gradients_of(module: nn.Module) -> list[Tensor]:
    """Every gradient that there is."""
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def scaled(factor: float) -> Change:
    """Multiplies every gradient."""

    def change(module: nn.Module) -> None:
        for gradient in gradients_of(module):
            gradient.mul_(factor)

    return change


def norm_weight(module: nn.Module) -> nn.Parameter:
    """The weight of the module's first norm."""
    kinds = (nn.LayerNorm, nn.BatchNorm1d)
    weight: nn.Parameter = next(part for part in module.modules() if isinstance(part, kinds)).weight
    return weight


NORM = r"norm.*\.weight$"  # matches the name of norm_weight's parameter first


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` through a narrower type."""
    return tensor.to(dtype).to(tensor.dtype)
