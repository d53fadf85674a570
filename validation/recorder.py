"""The recorder: wrapped around stages and gradient work, it copies what passes and changes no bit of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from pipeline.action import Action, Kind
from pipeline.boundary import Gradients, Tensors
from pipeline.gradients import GradientWork
from pipeline.stage import Goal, Stage
from pipeline.step import Parts
from validation.around import AroundGradients, AroundStage
from validation.recording import (
    FLOWED,
    GIVEN,
    HANDED_ON,
    KEPT,
    LATE,
    LOSS,
    MADE,
    OUTPUT,
    RECEIVED,
    USED,
    Addition,
    Point,
    Recording,
    together,
)
from validation.snapshot import Named, Snapshot, Versions, gradients, parameters, versions

_NOTHING = Snapshot((), (), {})


class RecordedStage(AroundStage):
    """A stage whose tensors are copied: by this wrapper where they come and go, by plain hooks at its module."""

    def __init__(self, inner: Stage) -> None:
        super().__init__(inner)
        self._tensors: dict[Point, Sequence[Tensor | None]] = {}
        self._graphs: dict[tuple[int, int], tuple[int, ...]] = {}
        self._additions: list[tuple[Action, Snapshot | None, Snapshot]] = []
        self._named: Named = ()
        self._written: Versions = ()
        self._before: Snapshot | None = None
        self._inputs: dict[int, Sequence[Tensor]] = {}
        self._received: dict[int, Gradients] = {}
        self._backward_of: int | None = None
        self._parameters = _NOTHING

    def begin(self) -> None:
        self._tensors, self._graphs, self._additions = {}, {}, []
        self._inputs, self._received, self._backward_of = {}, {}, None
        self._named = list(self.module.named_parameters(remove_duplicate=False))
        self._written, self._parameters = (), parameters(self._named)
        self.inner.begin()

    def gradients(self) -> Snapshot:
        """Those of the stage's parameters, now."""
        return gradients(self._named)

    def recorded(self) -> Recording:
        """What passed since ``begin``."""
        additions = [
            Addition(action, None if before is None else before.tensors(), after.tensors())
            for action, before, after in self._additions
        ]
        began = {(self.index, name): value for name, value in self._parameters.tensors().items() if value is not None}
        return Recording(self._tensors, self._graphs, {self.index: tuple(additions)}, parameters=began)

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        def called(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            self._inputs[microbatch] = [argument for argument in arguments if isinstance(argument, Tensor)]
            self._note(microbatch, USED, self._inputs[microbatch])

        def returned(module: nn.Module, arguments: tuple[Any, ...], outputs: Any) -> None:
            self._made(microbatch, outputs if isinstance(outputs, tuple | list) else (outputs,))

        self._note(microbatch, GIVEN, inputs)
        hooks = [self.module.register_forward_pre_hook(called), self.module.register_forward_hook(returned)]
        try:
            outputs = self.inner.forward(microbatch, inputs, goal)
        finally:
            for hook in hooks:
                hook.remove()
        if goal is None:
            self._note(microbatch, OUTPUT, outputs)
        elif microbatch in self.losses:
            self._note(microbatch, LOSS, (self.losses[microbatch],))
        return outputs

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        self._begin_backward(microbatch, gradients)
        result = self.inner.backward(microbatch, gradients)
        self._note(microbatch, HANDED_ON, result)
        self._added(Kind.BACKWARD, microbatch)
        return result

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        self._begin_backward(microbatch, gradients)
        self._received[microbatch] = gradients
        result = self.inner.backward_input(microbatch, gradients)
        self._note(microbatch, HANDED_ON, result)
        self._added(Kind.BACKWARD_INPUT, microbatch)
        return result

    def backward_weight(self, microbatch: int) -> None:
        self._note(microbatch, LATE, self._received.pop(microbatch, ()))
        # Where no input wanted a gradient, the graph runs now; else its ends run once more, which is no news.
        self._start(microbatch, graph=(self.index, microbatch) not in self._graphs)
        self.inner.backward_weight(microbatch)
        self._added(Kind.BACKWARD_WEIGHT, microbatch)

    def _begin_backward(self, microbatch: int, gradients: Gradients) -> None:
        self._note(microbatch, RECEIVED, gradients)
        self._keep(microbatch)
        self._start(microbatch, graph=True)

    def _keep(self, microbatch: int) -> None:
        """Note the module's input as the backward finds it: when it begins, and again when gradients begin to flow."""
        if microbatch in self._inputs:
            self._note(microbatch, KEPT, self._inputs[microbatch])

    def _made(self, microbatch: int, outputs: Sequence[Any]) -> None:
        tensors = [output for output in outputs if isinstance(output, Tensor)]
        self._note(microbatch, MADE, tensors)
        for number, tensor in enumerate(tensors):
            if tensor.requires_grad:
                # A hook on a tensor sees the gradient that flows, whoever started the backward.
                tensor.register_hook(lambda gradient, number=number: self._flowed(microbatch, number, gradient))  # type: ignore[no-untyped-call]  # in torch

    def _flowed(self, microbatch: int, number: int, gradient: Tensor) -> None:
        if self._backward_of is None:
            return
        key = self.index, self._backward_of
        seen = self._graphs.get(key, ())
        if not number:
            self._graphs[key] = (*seen, microbatch)
            self._keep(self._backward_of)
        point = Point(*key, FLOWED)
        found = list(self._tensors.get(point, ()))
        found += [None] * (number + 1 - len(found))
        found[number] = _copy(gradient)
        self._tensors[point] = found

    def _start(self, microbatch: int, *, graph: bool) -> None:
        self._backward_of = microbatch if graph else None
        # Torch counts the writes to a tensor, so that sums nobody touched need not be copied to see that. What writes
        # past that count shows at the end of this action, as an addition that is not the microbatch's.
        self._before = None if versions(self._named) == self._written else self.gradients()

    def _added(self, kind: Kind, microbatch: int) -> None:
        self._backward_of = None
        if kind is not Kind.BACKWARD_INPUT:
            self._inputs.pop(microbatch, None)
        self._written, after = versions(self._named), self.gradients()
        self._additions.append((Action(self.index, kind, microbatch), self._before, after))

    def _note(self, microbatch: int, where: str, tensors: Sequence[Tensor | None]) -> None:
        self._tensors[Point(self.index, microbatch, where)] = tuple(map(_copy, tensors))


class RecordedGradients(AroundGradients):
    """Gradient work before and after which the gradients are copied."""

    def __init__(self, inner: GradientWork, stages: Sequence[RecordedStage]) -> None:
        super().__init__(inner, stages)
        self._recorded = stages
        self._summed: dict[int, Snapshot] = {}
        self._clipped: dict[int, Snapshot] = {}

    def reduce_tied(self) -> None:
        self._summed, self._clipped = self._copies(), {}
        self.inner.reduce_tied()

    def scale(self, factor: float) -> None:
        self.inner.scale(factor)
        self._clipped = self._copies()

    def take(self) -> Recording:
        """What was copied since it was last asked."""
        taken = Recording(summed=_by_site(self._summed), clipped=_by_site(self._clipped))
        self._summed, self._clipped = {}, {}
        return taken

    def _copies(self) -> dict[int, Snapshot]:
        return {stage.index: stage.gradients() for stage in self._recorded}


class Recorder:
    """The wrappers around one rank's parts, and what they hold."""

    def __init__(self) -> None:
        self._stages: tuple[RecordedStage, ...] = ()
        self._gradients: RecordedGradients | None = None

    def wrap(self, parts: Parts) -> Parts:
        """``parts`` under observation; for ``PipelineSchedule.wrapped``."""
        self._stages = tuple(map(RecordedStage, parts.stages))
        self._gradients = RecordedGradients(parts.gradients, self._stages)
        return replace(parts, stages=self._stages, gradients=self._gradients)

    def take(self) -> Recording:
        """What passed in the operation that has just ended."""
        assert self._gradients is not None, "a recorder is wrapped around parts before it records"
        return together([*(stage.recorded() for stage in self._stages), self._gradients.take()])


def _by_site(copies: Mapping[int, Snapshot]) -> dict[tuple[int, str], Tensor | None]:
    return {(stage, name): copy for stage, one in copies.items() for name, copy in one.tensors().items()}


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", copy=True)
