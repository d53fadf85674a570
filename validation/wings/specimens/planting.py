"""Building blocks of faults: places in a pipeline, and plants, each with one change.

A plant is a function from a passing value and its facts to a replacement; or a function that changes a module or its
gradients in place. A fault that needs more of a step wraps a part of it (``pipeproof.core.observe.wrappers``), like
``on_transport``.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeproof.core.observe.wrappers import AroundGradients, AroundStage, AroundSteps, AroundTransport, Pairs, Steps
from pipeproof.own.faults import Drive, Plant, pass_on
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.boundary import Gradients, Tensors
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.stage import Goal, Stage
from pipeproof.pipeline.step import Parts, ScheduleResult
from pipeproof.pipeline.transport import Message, Transport
from pipeproof.wings.specimens.specimen import StageAt

Edit = Callable[[nn.Module], None]
Shares = dict[nn.Parameter, Tensor]  # gradients, by parameter
_Backward = Callable[[int, Gradients], Gradients]
_Find = Callable[[nn.Module], Iterable[nn.Parameter]]


def first(n_stages: int) -> int:
    """The first stage."""
    return 0


def second(n_stages: int) -> int:
    """Return the second stage, or the only one."""
    return min(1, n_stages - 1)


def middle(n_stages: int) -> int:
    """The stage in the middle."""
    return n_stages // 2


def last(n_stages: int) -> int:
    """The last stage."""
    return n_stages - 1


def stages_at(parts: Parts, place: StageAt | None) -> list[Stage]:
    """Return this rank's stage at ``place``, if here; without a place, all stages."""
    at = None if place is None else place(parts.program.schedule.n_stages)
    return [stage for stage in parts.stages if at in (None, stage.index)]


def both(*plants: Plant) -> Plant:
    """Plant several faults in order."""

    def plant(parts: Parts) -> Parts:
        for one in plants:
            parts = one(parts)
        return parts

    return plant


def on_modules(change: Edit, place: StageAt | None = None) -> Plant:
    """Change the module of the stage at ``place``, or of every stage, once, before the first step."""

    def plant(parts: Parts) -> Parts:
        for stage in stages_at(parts, place):
            change(stage.module)
        return parts

    return plant


def on_gradients(change: Edit, place: StageAt | None = None, *, clipped: bool = False) -> Plant:
    """Change a module's gradients after the last backward; or, if ``clipped``, after clipping: observed by the
    optimizer alone."""
    changed = on_modules(change, place)
    return on_work(clipped=changed) if clipped else on_work(before=changed)


def on_work(
    *,
    before: Callable[[Parts], object] = pass_on,
    reduce: Callable[[Parts], object] = lambda parts: parts.gradients.reduce_tied(),
    reduced: Callable[[Parts], object] = pass_on,
    squares: Callable[[list[float], Parts], list[float]] = pass_on,
    scale: Callable[[float, Parts], object] = lambda factor, parts: parts.gradients.scale(factor),
    clipped: Callable[[Parts], object] = pass_on,
) -> Plant:
    """Change the work on gradients: how tied ones are summed, the squares that make the norm, how they are clipped.

    ``before`` and once they are ``reduced``, or ``clipped``: what else is done to them.
    """

    class Work(AroundGradients):
        def __init__(self, parts: Parts) -> None:
            super().__init__(parts.gradients, parts.stages)
            self._parts = parts

        def reduce_tied(self) -> None:
            before(self._parts)
            reduce(self._parts)
            reduced(self._parts)

        def squares(self) -> list[float]:
            return squares(self.inner.squares(), self._parts)

        def scale(self, factor: float) -> None:
            scale(factor, self._parts)
            clipped(self._parts)

    return lambda parts: replace(parts, gradients=Work(parts))


class Call(NamedTuple):
    """A microbatch in a stage: the inputs of its forward, and the outputs."""

    stage: Stage
    schedule: Schedule
    microbatch: int
    inputs: Tensors = ()
    outputs: Tensors = ()


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Changes to a stage. Functions get the call, and most get the passing value, too."""

    inputs: Callable[[Tensors, Call], Tensors] = pass_on  # of a forward
    goal: Callable[[Goal, Call], Goal] = pass_on  # of the last stage's forward: its loss
    during: Callable[[Call], AbstractContextManager[object]] = nullcontext  # open during a forward
    given: Callable[[Gradients, Call], Gradients] = pass_on  # what a backward is given for the outputs
    hands: Callable[[Gradients, Call], Gradients] = pass_on  # what it hands back for the inputs
    adding: Callable[[Call], AbstractContextManager[object]] = nullcontext  # while it adds to parameters' gradients
    whose: Callable[[int], int] = pass_on  # the microbatch whose saved tensors a backward takes


def on_stages(changes: Changes, place: StageAt | None = None) -> Plant:
    """Change inputs and behaviour of the stage at ``place``, or every stage."""
    return around_stages(lambda stage, schedule: _ChangedStage(stage, schedule, changes), place)


def around_stages(wrap: Callable[[Stage, Schedule], Stage], place: StageAt | None = None) -> Plant:
    """Wrap the stage at ``place``, or every stage."""

    def plant(parts: Parts) -> Parts:
        schedule, those = parts.program.schedule, stages_at(parts, place)
        return replace(parts, stages=tuple(wrap(s, schedule) if s in those else s for s in parts.stages))

    return plant


class _ChangedStage(AroundStage):
    def __init__(self, inner: Stage, schedule: Schedule, changes: Changes) -> None:
        super().__init__(inner)
        self._schedule = schedule
        self._changes = changes
        self._calls: dict[int, Call] = {}

    def begin(self) -> None:
        self._calls = {}
        self.inner.begin()

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        call = Call(self.inner, self._schedule, microbatch)
        inputs = self._changes.inputs(inputs, call)
        with self._changes.during(call):
            outputs = self.inner.forward(microbatch, inputs, goal and self._changes.goal(goal, call))
        self._calls[microbatch] = call._replace(inputs=inputs, outputs=tuple(x.detach() for x in outputs))
        return outputs

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        with self._changes.adding(self._calls[microbatch]):
            return self._differentiate(self.inner.backward, microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        return self._differentiate(self.inner.backward_input, microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        with self._changes.adding(self._calls[microbatch]):
            self.inner.backward_weight(self._changes.whose(microbatch))

    def _differentiate(self, run: _Backward, microbatch: int, gradients: Gradients) -> Gradients:
        call = self._calls[microbatch]
        handed = run(self._changes.whose(microbatch), self._changes.given(gradients, call))
        return self._changes.hands(handed, call)


@contextmanager
def collect_apart(module: nn.Module) -> Iterator[Shares]:
    """Collect additions to gradients in the mapping while open, then restore gradients."""
    before, shares = {parameter: parameter.grad for parameter in module.parameters()}, Shares()
    module.zero_grad()
    yield shares
    shares.update(gradients_by_parameter(module))
    for parameter, gradient in before.items():
        parameter.grad = gradient


def add(shares: Shares, times: float = 1.0) -> None:
    """Add ``shares`` to the gradients of their parameters."""
    for parameter, share in shares.items():
        parameter.grad = share * times if parameter.grad is None else parameter.grad + share * times


def count_shares(times: Callable[[Schedule, int], Mapping[int, float]], place: StageAt | None = None) -> Plant:
    """Add microbatch m's share ``times(schedule, stage)[m]`` times, if present: 0 drops it, 2 doubles it."""

    @contextmanager
    def adding(call: Call) -> Iterator[None]:
        factor = times(call.schedule, call.stage.index).get(call.microbatch, 1.0)
        with nullcontext(Shares()) if factor == 1.0 else collect_apart(call.stage.module) as shares:
            yield
        if factor != 0.0:
            add(shares, factor)

    return on_stages(Changes(adding=adding), place)


def put_off(late: Callable[[Call], bool], *, reduced: bool) -> Plant:
    """Add ``late`` shares last to first after the step: after tied gradients are ``reduced``, or before."""

    def plant(parts: Parts) -> Parts:
        shares: list[Shares] = []

        @contextmanager
        def adding(call: Call) -> Iterator[None]:
            with collect_apart(call.stage.module) if late(call) else nullcontext(Shares()) as share:
                yield
            shares.append(share)

        def add_all(parts: Parts) -> None:
            while shares:
                add(shares.pop())

        work = on_work(reduced=add_all) if reduced else on_work(before=add_all)
        return both(on_stages(Changes(adding=adding)), work)(parts)

    return plant


@dataclass(frozen=True)
class To:
    """Messages between stages: kind, receiving stage, microbatches. Omitted fields match all."""

    kind: Kind
    stage: int | None = None
    microbatches: Collection[int] = ()

    def __contains__(self, message: Message) -> bool:
        action = message.name
        if not isinstance(action, Action) or action.kind is not self.kind:
            return False
        return self.stage in (None, action.stage) and action.microbatch in (self.microbatches or [action.microbatch])


class Arrived(NamedTuple):
    """A message: its receiving stage, if between stages; and data kept from earlier ones to this rank."""

    stage: int | None
    kept: dict[int, Tensor]


def on_arrival(change: Callable[[Tensor, Arrived], Tensor], those: To | None = None) -> Plant:
    """Change ``those`` messages, or all, on arrival: the bytes for a stage."""

    class Arriving(AroundTransport):
        def __init__(self, inner: Transport) -> None:
            super().__init__(inner)
            self._kept: dict[int, Tensor] = {}

        def receive(self, message: Message) -> Tensor:
            arrived = self.inner.receive(message)
            if those is not None and message not in those:
                return arrived
            return change(arrived, Arrived(getattr(message.name, "stage", None), self._kept))

    return on_transport(lambda transport, schedule: Arriving(transport))


def on_transport(wrap: Callable[[Transport, Schedule], Transport]) -> Plant:
    """Wrap the transport."""
    return lambda parts: replace(parts, transport=wrap(parts.transport, parts.program.schedule))


def on_steps(
    *,
    given: Callable[[Pairs, Steps], Pairs] = pass_on,
    reported: Callable[[ScheduleResult, Parts], ScheduleResult] = pass_on,
    operation: str = "train",
) -> Drive:
    """Change the arguments or results of an ``operation``; empty: of all."""

    class Driven(AroundSteps):
        def on_data(self, of: str, microbatches: Pairs) -> Pairs:
            return given(microbatches, self.inner) if operation in ("", of) else microbatches

        def on_result(self, of: str, result: ScheduleResult) -> ScheduleResult:
            return reported(result, self.parts) if operation in ("", of) else result

    return Driven


def move_twice(place: StageAt, which: _Find = nn.Module.parameters) -> Drive:
    """Move these parameters at twice the rate, by an optimizer without state, or in its first step."""

    def drive(steps: Steps) -> Steps:
        before = Shares()

        def on_data(microbatches: Pairs, steps: Steps) -> Pairs:
            for stage in stages_at(steps.parts, place):
                before.update({parameter: parameter.detach().clone() for parameter in which(stage.module)})
            return microbatches

        @torch.no_grad()
        def on_result(result: ScheduleResult, parts: Parts) -> ScheduleResult:
            for parameter, value in before.items():
                parameter.add_(parameter - value)
            return result

        return on_steps(given=on_data, reported=on_result)(steps)

    return drive


def gradients_by_parameter(module: nn.Module) -> Shares:
    """Return all gradients, by parameter."""
    return {parameter: parameter.grad for parameter in module.parameters() if parameter.grad is not None}


def copies(stages: Sequence[Stage]) -> Shares:
    """Copy every gradient of ``stages``."""
    return {p: g.clone() for stage in stages for p, g in gradients_by_parameter(stage.module).items()}


def multiply(gradients: Gradients, factor: float) -> Gradients:
    """Multiply gradients by ``factor``; missing ones stay missing."""
    return tuple(None if gradient is None else gradient * factor for gradient in gradients)


def gradients_of(module: nn.Module) -> list[Tensor]:
    """Return all gradients of a module."""
    return list(gradients_by_parameter(module).values())


def squares_of(module: nn.Module) -> list[float]:
    """Return the sum of squares for each gradient."""
    return [float(torch.linalg.vector_norm(g, dtype=torch.float64).item() ** 2) for g in gradients_of(module)]


def on_each(change: Callable[[Tensor], object], of: _Find = nn.Module.parameters) -> Edit:
    """Change every gradient ``of`` these parameters."""

    def changed(module: nn.Module) -> None:
        for parameter in of(module):
            if parameter.grad is not None:
                change(parameter.grad)

    return changed


def scale(factor: float) -> Edit:
    """Multiplies every gradient."""
    return on_each(lambda gradient: gradient.mul_(factor))


def on_parts(
    kinds: tuple[type[nn.Module], ...], change: Callable[[Any, int], object], *, most: int | None = None
) -> Edit:
    """Change a module's parts of some kinds, or the first ``most``; counted from 0."""

    def changed(module: nn.Module) -> None:
        for number, part in enumerate([part for part in module.modules() if isinstance(part, kinds)][:most]):
            change(part, number)

    return changed


def norm_weight(module: nn.Module) -> list[nn.Parameter]:
    """Return the weight of the module's first norm."""
    return [part.weight for part in module.modules() if isinstance(part, NORMS)][:1]


NORMS = (nn.LayerNorm, nn.BatchNorm1d)


def round_through(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` through a narrower type."""
    return tensor.to(dtype).to(tensor.dtype)
