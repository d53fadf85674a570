"""Framework steps on torch's pipeline schedules: observation common to all such frameworks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.observe.per_rank_globals import belongs_to_rank
from pipeproof.whitebox.handed_back import Gradient
from pipeproof.whitebox.torch_pipelining import Recorder, by_microbatches, stages_of
from pipeproof.wings.adapters.framework import AdapterError, around
from pipeproof.wings.adapters.step import Drawn, FrameworkStep, Sight

_BY_MICROBATCHES = {"arg_mbs", "kwarg_mbs", "target_mbs"}
# The second place is for torch's own ``clip_grad_norm_``.
_CLIPS = ((torch.nn.utils, "clip_grads_with_norm_"), (torch.nn.utils.clip_grad, "_clip_grads_with_norm_"))
for _place, _name in _CLIPS:
    belongs_to_rank(_place, _name, fresh=lambda clip: clip)


def step_of_schedule(schedule: Any, modules: Sequence[nn.Module], name: Callable[[int, str], str]) -> FrameworkStep:
    """Return this schedule's step on this rank, with stages ``modules``; every torch accepts its microbatches.

    Gradients are complete when torch clips them by a norm, and reports it; else at the end. ``name``: see
    ``FrameworkStep``.
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
    """Note losses and data, and notify ``sight`` of torch's first clipping, which begins with complete gradients.

    Further parts of a model may be clipped separately. Every torch accepts the step's microbatches.
    """
    clipped = False

    def clipping(clip: Any, parameters: Any, max_norm: float, total_norm: Tensor, *more: Any, **named: Any) -> Any:
        nonlocal clipped
        if not clipped:
            clipped = True
            sight.complete()
            sight.norm(total_norm)
        return clip(parameters, max_norm, total_norm, *more, **named)

    def step(inner: Any, *given: Any, **named: Any) -> Any:
        if clipped and getattr(schedule, "_has_backward", True):  # training after clipping is a second step
            sight.complete()
        for inputs in (given, *(named.get("arg_mbs") or ())):
            if inputs:
                drawn.note_rows(inputs[:1])  # of the first stage
        drawn.note_targets([named.get("target"), *(named.get("target_mbs") or ())])
        found = named.get("losses")
        found = [] if found is None else found
        call = partial(by_microbatches, inner, schedule) if _BY_MICROBATCHES & set(named) else inner
        made = call(*given, **{**named, "losses": found})
        losses.extend(loss.detach().clone() for loss in found)
        return made

    with ExitStack() as stack:
        recorders.append(Recorder(schedule))  # not before: a check that is refused leaves the stages alone
        stack.callback(recorders[-1].stop)
        for place, name in _CLIPS:
            stack.enter_context(around(place, name, clipping))
        stack.enter_context(around(schedule, "step", step))
        yield
