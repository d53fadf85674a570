"""Recorder: wraps stages and copies passing tensors, without changing a bit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipeproof.core.observe.elements import version
from pipeproof.core.observe.fence import Fence, looking
from pipeproof.core.observe.recording import (
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
    Point,
    Recording,
    Site,
    merge,
)
from pipeproof.core.observe.wrappers import AroundStage
from pipeproof.pipeline.boundary import Gradients, Tensors
from pipeproof.reference.graph import hook_at

if TYPE_CHECKING:
    from pipeproof.pipeline.stage import Goal, Stage
    from pipeproof.pipeline.step import Parts


Named = Sequence[tuple[str, nn.Parameter]]
Copies = Sequence[Tensor | None]
Mark = tuple[Tensor | None, int | None]  # a gradient, with torch's write count


class RecordedStage(AroundStage):
    """A stage with copied tensors: at its boundary by this wrapper, at its module by plain hooks.

    During a step, copies stay unsorted on their device; ``finish`` sorts them.
    """

    def __init__(self, inner: Stage) -> None:
        super().__init__(inner)
        self.fence = Fence()
        self._hooks: list[RemovableHandle] = []
        self._forget()

    def _forget(self) -> None:
        self._named: Named = ()
        self._began: dict[Site, Tensor] = {}
        self._marks: Sequence[Mark] = ()
        self._adders: list[int] = []
        self._observed: dict[Point, Copies] = {}
        self._flows: dict[int, dict[int, Tensor]] = {}  # by backward and output number, copies of gradients
        self._graphs: dict[int, list[int]] = {}
        self._inputs: dict[int, Sequence[Tensor]] = {}
        self._received: dict[int, Gradients] = {}
        self._forward_of: int | None = None
        self._backward_of: int | None = None
        self._ran: Collection[int] = ()  # outputs already reached in the backward's first half

    def begin(self) -> None:
        self._forget()
        self._leave()
        self._look_at_module()
        self.inner.begin()

    @looking
    def _look_at_module(self) -> None:
        # Hooks stay until the end: adding and removing them per forward costs more than running them.
        self._hooks = [
            self.module.register_forward_pre_hook(self.fence.around(self._on_call)),
            self.module.register_forward_hook(self.fence.around(self._on_return)),
        ]
        self._named = list(self.module.named_parameters(remove_duplicate=False))
        self._began = {(self.index, name): parameter.detach().clone() for name, parameter in self._named}

    def finish(self) -> Recording:
        """Return tensors since ``begin``, and stop watching."""
        self._leave()
        stage = self.index
        tensors: dict[Point, Copies] = {
            point: tuple([None if one is None else one.cpu() for one in copies])
            for point, copies in self._observed.items()
        }
        for microbatch, flows in self._flows.items():
            found = [flows[k].cpu() if k in flows else None for k in range(max(flows) + 1)]
            tensors[Point(stage, microbatch, FLOWED)] = found
        began = {site: copy.cpu() for site, copy in self._began.items()}
        graphs = {(stage, microbatch): tuple(made) for microbatch, made in self._graphs.items()}
        return Recording(tensors, graphs, {stage: tuple(self._adders)}, began)

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        self._note(microbatch, GIVEN, inputs)
        self._forward_of = microbatch
        try:
            outputs = self.inner.forward(microbatch, inputs, goal)
        finally:
            self._forward_of = None
        if goal is None:
            self._note(microbatch, OUTPUT, outputs)
        elif microbatch in self.losses:
            self._note(microbatch, LOSS, (self.losses[microbatch],))
        return outputs

    def _on_call(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._forward_of is not None:
            taken = self._inputs[self._forward_of] = [one for one in arguments if isinstance(one, Tensor)]
            self._note(self._forward_of, USED, taken)

    def _on_return(self, module: nn.Module, arguments: tuple[Any, ...], outputs: Any) -> None:
        microbatch = self._forward_of
        if microbatch is None:
            return
        every = outputs if isinstance(outputs, tuple | list) else (outputs,)
        tensors = [output for output in every if isinstance(output, Tensor)]
        self._note(microbatch, MADE, tensors)
        for number, tensor in enumerate(tensors):
            if tensor.requires_grad:
                # A tensor hook sees gradients from any backward.
                hook_at(tensor, self.fence.around(partial(self._on_flow, microbatch, number)))

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        return self._differentiate(microbatch, gradients, whole=True)

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        self._received[microbatch] = gradients
        return self._differentiate(microbatch, gradients, whole=False)

    def _differentiate(self, microbatch: int, gradients: Gradients, *, whole: bool) -> Gradients:
        self._note(microbatch, RECEIVED, gradients)
        self._keep(microbatch)
        self._start(microbatch)
        handed_on = (self.inner.backward if whole else self.inner.backward_input)(microbatch, gradients)
        self._note(microbatch, HANDED_ON, handed_on)
        self._end_backward(microbatch, whole=whole)
        return handed_on

    def backward_weight(self, microbatch: int) -> None:
        self._note(microbatch, LATE, self._received.pop(microbatch, ()))
        # Parts without a path to inputs run now; parts that ran already repeat, which adds nothing new.
        self._start(microbatch, ran={*self._flows.get(microbatch, ())})
        self.inner.backward_weight(microbatch)
        self._end_backward(microbatch, whole=True)

    def _keep(self, microbatch: int) -> None:
        """Note the module's input at the backward's start, and at the first gradient flow."""
        if microbatch in self._inputs:
            self._note(microbatch, KEPT, self._inputs[microbatch])

    def _on_flow(self, made: int, number: int, gradient: Tensor) -> None:
        microbatch = self._backward_of
        if microbatch is None or number in self._ran:
            return
        if not number:
            self._graphs.setdefault(microbatch, []).append(made)
            self._keep(microbatch)
        self._flows.setdefault(microbatch, {})[number] = gradient.detach().clone()

    @looking
    def _start(self, microbatch: int, *, ran: Collection[int] = ()) -> None:
        self._backward_of, self._ran = microbatch, ran
        self._marks = self._mark_passage()

    @looking
    def _end_backward(self, microbatch: int, *, whole: bool) -> None:
        self._backward_of = None
        if whole:
            self._inputs.pop(microbatch, None)
        pairs = zip(self._marks, self._mark_passage(), strict=True)
        if any(one is not other or times != then for (one, times), (other, then) in pairs):
            self._adders.append(microbatch)

    def _mark_passage(self) -> Sequence[Mark]:
        grads = [parameter.grad for _, parameter in self._named]
        return [(grad, None if grad is None else version(grad)) for grad in grads]

    def _leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @looking
    def _note(self, microbatch: int, where: str, tensors: Sequence[Tensor | None]) -> None:
        copies = [None if tensor is None else tensor.detach().clone() for tensor in tensors]
        self._observed[Point(self.index, microbatch, where)] = copies


class Recorder:
    """Wraps one rank's parts and collects their recordings."""

    def __init__(self) -> None:
        self._stages: tuple[RecordedStage, ...] = ()

    def wrap(self, parts: Parts) -> Parts:
        """Wrap ``parts``; for ``PipelineSchedule.wrap``."""
        self._stages = tuple(map(RecordedStage, parts.stages))
        return replace(parts, stages=self._stages)

    def take(self) -> Recording | None:
        """Return the last operation's recording. None if incomplete."""
        assert self._stages, "a recorder is wrapped around parts before it records"
        if any(stage.fence.broken for stage in self._stages):
            return None
        return merge([stage.finish() for stage in self._stages])
