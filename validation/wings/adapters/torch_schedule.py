"""A step of a framework whose pipeline is one of torch's schedules: what it shows, whoever's model is in it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.observe.belongings import belongs_to_rank
from pipeproof.whitebox.handed_back import Gradient
from pipeproof.whitebox.torch_pipelining import Recorder, by_microbatches, stages_of
from pipeproof.wings.adapters.drawn import Drawn
from pipeproof.wings.adapters.framework import AdapterError, around
from pipeproof.wings.adapters.step import FrameworkStep, Sight

_BY_MICROBATCHES = {"arg_mbs", "kwarg_mbs", "target_mbs"}
_CLIPS = ((torch.nn.utils, "clip_grads_with_norm_"), (torch.nn.utils.clip_grad, "_clip_grads_with_norm_"))
for _place, _name in _CLIPS:
    belongs_to_rank(_place, _name, fresh=lambda clip: clip)


def step_of_schedule(schedule: Any, modules: Sequence[nn.Module], name: Callable[[int, str], str]) -> FrameworkStep:
    """The step of this schedule on this rank, whose stages are ``modules``; it takes microbatches in every torch.

    Gradients are complete when torch is about to clip them by a norm, which it then tells; else at the end. ``name`` is
    that of a ``FrameworkStep``.
    """
    recorders, losses, drawn = list[Recorder](), list[Tensor](), Drawn()

    def gradients() -> dict[nn.Parameter, Gradient]:
        if not any(one.executed for one in recorders):
            raise AdapterError("pp_schedule took no step: call pp_schedule.step in the block")
        return {one: one.grad for module in modules for one in module.parameters() if one.requires_grad}

    return FrameworkStep(
        {stage.stage_index: module for stage, module in zip(stages_of(schedule), modules, strict=True)},
        name,
        gradients,
        lambda: losses,
        partial(_watching, schedule, recorders, losses, drawn),
        when=lambda: any(one.forward is not None for one in recorders),
        actions=lambda: [action for one in recorders for action in one.executed],
        drawn=drawn,
    )


@contextmanager
def _watching(
    schedule: Any, recorders: list[Recorder], losses: list[Tensor], drawn: Drawn, sight: Sight
) -> Iterator[None]:
    """While this is open, note losses and data, and tell ``sight`` when gradients are to be clipped, and the norm."""
    with ExitStack() as stack:
        recorders.append(Recorder(schedule))  # not before: a check that is refused leaves the stages alone
        stack.callback(recorders[-1].stop)
        told = stack.enter_context(clipping_told(sight))
        stack.enter_context(around(schedule, "step", _step_noted(schedule, (losses, drawn), sight, told)))
        yield


def _step_noted(
    schedule: Any, notes: tuple[list[Tensor], Drawn], sight: Sight, told: Sequence[Tensor]
) -> Callable[..., Any]:
    """Around ``schedule.step``: note losses and what goes into the first stage; it takes microbatches in every torch.

    One that trains after gradients were clipped, of which ``told`` has the norm, is of a second step: ``sight`` hears.
    """
    losses, drawn = notes

    def step(inner: Any, *given: Any, **named: Any) -> Any:
        if told and getattr(schedule, "_has_backward", True):
            sight.complete()
        for inputs in (given, *(named.get("arg_mbs") or ())):
            if inputs:
                drawn.note_rows(inputs[:1])
        drawn.note_targets([named.get("target"), *(named.get("target_mbs") or ())])
        found = named.get("losses")
        found = [] if found is None else found
        call = partial(by_microbatches, inner, schedule) if _BY_MICROBATCHES & set(named) else inner
        made = call(*given, **{**named, "losses": found})
        losses.extend(loss.detach().clone() for loss in found)
        return made

    return step


@contextmanager
def clipping_told(sight: Sight) -> Iterator[Sequence[Tensor]]:
    """While this is open, torch tells ``sight`` when it first clips: parts of a model may be clipped apart.

    It is told before that gradients are complete. What this gives then has the norm. The second place is where torch's
    own ``clip_grad_norm_`` looks.
    """
    told = list[Tensor]()

    def clipping(clip: Any, parameters: Any, max_norm: float, total_norm: Tensor, *more: Any, **named: Any) -> Any:
        if not told:
            told.append(total_norm)
            sight.complete()
            sight.norm(total_norm)
        return clip(parameters, max_norm, total_norm, *more, **named)

    with ExitStack() as stack:
        for place, name in _CLIPS:
            stack.enter_context(around(place, name, clipping))
        yield told
