"""The recorder: wrapped around stages and gradient work, it copies what passes and changes no bit of it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.hooks import RemovableHandle

from pipeproof.observers.elements import version
from pipeproof.observers.recording import (
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
    Site,
    merged,
)
from pipeproof.observers.wrappers import AroundGradients, AroundStage
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.boundary import Gradients, Tensors
from pipeproof.pipeline.gradients import GradientWork
from pipeproof.pipeline.stage import Goal, Stage
from pipeproof.pipeline.step import Parts
from pipeproof.worlds.fence import Fence, looking

Named = Sequence[tuple[str, nn.Parameter]]
Held = Sequence[Tensor | None]  # the gradients that parameters have, themselves


@dataclass(frozen=True)
class Snapshot:
    """What ``tensors`` of one form held: all of one type laid end to end, which is one copy for all.

    ``dtypes`` has None where there was none. The copies are where the tensors were: on a GPU nothing waits for them.
    """

    dtypes: Sequence[torch.dtype | None]
    flat: Mapping[torch.dtype, Tensor]

    @classmethod
    def of(cls, tensors: Held) -> "Snapshot":
        """What ``tensors`` hold now."""
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        flat = {
            dtype: _laid_out([tensor for tensor in tensors if tensor is not None and tensor.dtype is dtype])
            for dtype in set(dtypes)
            if dtype is not None
        }
        return cls(dtypes, flat)

    def tensors(self, named: Named) -> dict[str, Tensor | None]:
        """By name, as they were, on the CPU; ``named`` are the parameters that they belong to, of the same shapes."""
        found: dict[str, Tensor | None] = dict.fromkeys(name for name, _ in named)
        for dtype, flat in self.flat.items():
            own = [one for one, held in zip(named, self.dtypes, strict=True) if held is dtype]
            parts = _unflatten_dense_tensors(flat.cpu(), [parameter for _, parameter in own])  # type: ignore[no-untyped-call]  # in torch
            found |= zip((name for name, _ in own), parts, strict=True)
        return found


@dataclass(frozen=True)
class Mark:
    """Which gradients there were, and how often each had been written to: tells whether anybody touched them since."""

    tensors: Held
    versions: Sequence[int | None]

    @classmethod
    def of(cls, tensors: Held) -> "Mark":
        """A mark of ``tensors``, which it keeps: no other tensor can come to be in the place of one let go."""
        return cls(tensors, [version(tensor) for tensor in tensors if tensor is not None])

    def stands(self, tensors: Held) -> bool:
        """Whether ``tensors`` are those of the mark and nothing was written to them, as far as torch counts writes."""
        same = len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors))
        return same and self.versions == [version(tensor) for tensor in tensors if tensor is not None]


def gradients(named: Named) -> Held:
    """The gradients that parameters have."""
    return [parameter.grad for _, parameter in named]


def parameters(named: Named) -> Snapshot:
    """What the parameters themselves hold."""
    return Snapshot.of([parameter.detach() for _, parameter in named])


def _laid_out(tensors: Sequence[Tensor]) -> Tensor:
    """``tensors`` end to end, in a storage of their own: one alone would be given back as it is."""
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]  # in torch
    return flat if len(tensors) > 1 else flat.clone()


Copies = Sequence[Tensor | None]


class RecordedStage(AroundStage):
    """A stage whose tensors are copied: by this wrapper where they come and go, by plain hooks at its module.

    While a step runs, copies are only listed, on the device that they were made on; ``recorded`` sorts them.
    """

    def __init__(self, inner: Stage) -> None:
        super().__init__(inner)
        self.fence = Fence()
        self._hooks: list[RemovableHandle] = []
        self._forget()

    def _forget(self) -> None:
        self._named: Named = ()
        self._parameters = Snapshot((), {})
        self._seen: list[tuple[int, str, Copies]] = []
        # Gradients that flowed: in whose backward, as which of the module's outputs.
        self._flows: list[tuple[int, int, Tensor]] = []
        self._graphs: dict[int, list[int]] = {}
        self._additions: list[tuple[Kind, int, Snapshot | None, Snapshot]] = []
        self._mark = Mark((), ())
        self._before: Snapshot | None = None
        self._inputs: dict[int, Sequence[Tensor]] = {}
        self._received: dict[int, Gradients] = {}
        self._forward_of: int | None = None
        self._backward_of: int | None = None
        self._ran: Collection[int] = ()  # the outputs into which that backward's first half let gradients flow

    def begin(self) -> None:
        self._forget()
        self._leave()
        self._look_at_module()
        self.inner.begin()

    @looking
    def _look_at_module(self) -> None:
        # Until the recording is asked for: putting hooks on and off for every forward takes longer than what they do.
        self._hooks = [
            self.module.register_forward_pre_hook(self.fence.around(self._called)),
            self.module.register_forward_hook(self.fence.around(self._returned)),
        ]
        self._named = list(self.module.named_parameters(remove_duplicate=False))
        self._parameters = self.held()

    def gradients(self) -> Snapshot:
        """Those of the stage's parameters, now."""
        return Snapshot.of(gradients(self._named))

    def held(self) -> Snapshot:
        """What the stage's parameters themselves hold, now."""
        return parameters(self._named)

    def named(self, copies: Snapshot) -> dict[Site, Tensor | None]:
        """``copies`` by site."""
        return {(self.index, name): copy for name, copy in copies.tensors(self._named).items()}

    def recorded(self) -> Recording:
        """What passed since ``begin``; from now on the module is watched no more."""
        self._leave()
        stage = self.index
        tensors = {Point(stage, microbatch, where): _on_cpu(seen) for microbatch, where, seen in self._seen}
        for microbatch, number, gradient in self._flows:
            found = list(tensors.get(Point(stage, microbatch, FLOWED), ()))
            found += [None] * (number + 1 - len(found))
            found[number] = gradient.cpu()
            tensors[Point(stage, microbatch, FLOWED)] = found
        additions = [
            Addition(
                Action(stage, kind, microbatch),
                None if before is None else before.tensors(self._named),
                after.tensors(self._named),
            )
            for kind, microbatch, before, after in self._additions
        ]
        graphs = {(stage, microbatch): tuple(made) for microbatch, made in self._graphs.items()}
        began = {site: value for site, value in self.named(self._parameters).items() if value is not None}
        return Recording(tensors, graphs, {stage: tuple(additions)}, parameters=began)

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

    def _called(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._forward_of is not None:
            taken = self._inputs[self._forward_of] = [one for one in arguments if isinstance(one, Tensor)]
            self._note(self._forward_of, USED, taken)

    def _returned(self, module: nn.Module, arguments: tuple[Any, ...], outputs: Any) -> None:
        if self._forward_of is not None:
            self._made(self._forward_of, outputs if isinstance(outputs, tuple | list) else (outputs,))

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        self._begin_backward(microbatch, gradients)
        return self._end_backward(Kind.BACKWARD, microbatch, self.inner.backward(microbatch, gradients))

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        self._begin_backward(microbatch, gradients)
        self._received[microbatch] = gradients
        return self._end_backward(Kind.BACKWARD_INPUT, microbatch, self.inner.backward_input(microbatch, gradients))

    def backward_weight(self, microbatch: int) -> None:
        self._note(microbatch, LATE, self._received.pop(microbatch, ()))
        # What leads to no input runs now; the ends of what has run already run once more, which is no news.
        self._start(microbatch, ran={number for of, number, _ in self._flows if of == microbatch})
        self.inner.backward_weight(microbatch)
        self._added(Kind.BACKWARD_WEIGHT, microbatch)

    def _begin_backward(self, microbatch: int, gradients: Gradients) -> None:
        self._note(microbatch, RECEIVED, gradients)
        self._keep(microbatch)
        self._start(microbatch)

    def _end_backward(self, kind: Kind, microbatch: int, result: Gradients) -> Gradients:
        self._note(microbatch, HANDED_ON, result)
        self._added(kind, microbatch)
        return result

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
                flowed = self.fence.around(partial(self._flowed, microbatch, number))
                tensor.register_hook(flowed)  # type: ignore[no-untyped-call]  # in torch

    def _flowed(self, made: int, number: int, gradient: Tensor) -> None:
        microbatch = self._backward_of
        if microbatch is None or number in self._ran:
            return
        if not number:
            self._graphs.setdefault(microbatch, []).append(made)
            self._keep(microbatch)
        self._flows.append((microbatch, number, gradient.detach().clone()))

    @looking
    def _start(self, microbatch: int, *, ran: Collection[int] = ()) -> None:
        self._backward_of, self._ran = microbatch, ran
        # Torch counts the writes to a tensor, so that sums nobody touched need not be copied to see that. What writes
        # past that count shows at the end of this action, as an addition that is not the microbatch's.
        held = gradients(self._named)
        self._before = None if self._mark.stands(held) else Snapshot.of(held)

    @looking
    def _added(self, kind: Kind, microbatch: int) -> None:
        self._backward_of = None
        if kind is not Kind.BACKWARD_INPUT:
            self._inputs.pop(microbatch, None)
        held = gradients(self._named)
        self._mark = Mark.of(held)
        self._additions.append((kind, microbatch, self._before, Snapshot.of(held)))

    def _leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @looking
    def _note(self, microbatch: int, where: str, tensors: Sequence[Tensor | None]) -> None:
        copies = [None if tensor is None else tensor.detach().clone() for tensor in tensors]
        self._seen.append((microbatch, where, copies))


class RecordedGradients(AroundGradients):
    """Gradient work before and after which the gradients are copied."""

    def __init__(self, inner: GradientWork, stages: Sequence[RecordedStage]) -> None:
        super().__init__(inner, stages)
        self.fence = Fence()
        self._recorded = stages
        self._forget()

    def _forget(self) -> None:
        self._summed: dict[int, Snapshot] = {}
        self._clipped: dict[int, Snapshot] = {}
        self._ended: dict[int, Snapshot] = {}

    def reduce_tied(self) -> None:
        self._forget()
        self._look_at_sums()
        self.inner.reduce_tied()

    @looking
    def _look_at_sums(self) -> None:
        self._summed = self._copies()
        self._ended = {stage.index: stage.held() for stage in self._recorded}

    def scale(self, factor: float) -> None:
        self.inner.scale(factor)
        self._clipped = self.fence.around(self._copies)() or {}

    def take(self) -> Recording:
        """What was copied since it was last asked."""
        ended = {site: value for site, value in self._by_site(self._ended).items() if value is not None}
        taken = Recording(summed=self._by_site(self._summed), clipped=self._by_site(self._clipped), ended=ended)
        self._forget()
        return taken

    def _copies(self) -> dict[int, Snapshot]:
        return {stage.index: stage.gradients() for stage in self._recorded}

    def _by_site(self, copies: Mapping[int, Snapshot]) -> dict[Site, Tensor | None]:
        mine = (stage for stage in self._recorded if stage.index in copies)
        return {site: copy for stage in mine for site, copy in stage.named(copies[stage.index]).items()}


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

    def take(self) -> Recording | None:
        """What passed in the operation that has just ended; None where not all was seen."""
        assert self._gradients is not None, "a recorder is wrapped around parts before it records"
        if self._gradients.fence.broken or any(stage.fence.broken for stage in self._stages):
            return None
        return merged([*(stage.recorded() for stage in self._stages), self._gradients.take()])


def _on_cpu(copies: Copies) -> Copies:
    return tuple([None if copy is None else copy.cpu() for copy in copies])
