"""``torch.distributed.pipelining`` under ``whitebox.validate``: record its schedules' actions without disturbance.

A user's step builds any schedule class, also ``_PipelineScheduleRuntime`` with a CSV, and returns ``step(schedule,
microbatches)``. Actions replaced by custom functions are not recorded.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.hook import Hook
from pipeproof.core.observe.watching import watch
from pipeproof.pipeline.action import Action, Kind
from pipeproof.reference.accumulation import Accumulation
from pipeproof.whitebox.handed_back import StepResult

_ORDERS = ("pipeline_order_with_comms", "pipeline_order")  # for schedules with several stages per rank
_CHUNKS = {
    "forward_one_chunk": Kind.FORWARD,
    "backward_one_chunk": Kind.BACKWARD,
    "backward_weight_one_chunk": Kind.BACKWARD_WEIGHT,
}
Pairs = Sequence[tuple[Any, Tensor]]  # inputs (a tensor or a tuple of tensors) and target per microbatch


def stages_of(schedule: Any) -> list[Any]:
    """Return this rank's stages in a torch schedule."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def backwards_of(schedule: Any) -> Iterator[tuple[int, str, int]]:
    """Yield stage, kind (B, I or W) and microbatch for each planned backward, rank by rank.

    Schedules with one stage per rank plan none: torch never splits their backwards.
    """
    planned: Mapping[int, Sequence[Any]] = next(
        (found for name in _ORDERS if (found := getattr(schedule, name, None))), {}
    )
    actions = (action for own in planned.values() for action in own if action is not None)
    for one in (each for action in actions for each in (action.sub_actions or (action,))):
        if one.computation_type.value in ("B", "I", "W"):
            yield one.stage_index, one.computation_type.value, one.microbatch_index


class Recorder:
    """Records each chunk that ``schedule``'s stages compute, in order.

    called: module calls within forwards, with training mode, excluding torch's shape probe.
    """

    def __init__(self, schedule: Any) -> None:
        self.fence = Fence()
        self.executed: list[Action] = []
        self.called: list[tuple[Action, bool]] = []
        self.forward: Action | None = None  # currently running
        self._stages, self._hooks = stages_of(schedule), list[Any]()
        self._before = {one: {name: vars(one)[name] for name in _CHUNKS if name in vars(one)} for one in self._stages}
        for stage in self._stages:
            for name, kind in _CHUNKS.items():
                setattr(stage, name, self._around(stage, getattr(stage, name), kind))
            note = Hook(stage.submod, self.fence.around(self._note))
            self._hooks.append(stage.submod.register_forward_pre_hook(note))

    def stop(self) -> None:
        """Stop recording, and restore the stages."""
        for hook in self._hooks:
            hook.remove()
        for stage in self._stages:
            for name in _CHUNKS:
                vars(stage).pop(name, None)
            vars(stage).update(self._before[stage])

    def begin(self) -> None:
        """Forget earlier records."""
        self.executed, self.called = [], []

    def _around(self, stage: Any, inner: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
        def chunk(microbatch: int, *more: Any, **options: Any) -> Any:
            split = kind is Kind.BACKWARD and not options.get("full_backward", True)
            action = Action(stage.stage_index, Kind.BACKWARD_INPUT if split else kind, microbatch)
            if kind is Kind.FORWARD or stage.has_backward:
                self.executed.append(action)
            self.forward = action if kind is Kind.FORWARD else None
            try:
                return inner(microbatch, *more, **options)
            finally:
                self.forward = None

        return chunk

    def _note(self, module: nn.Module, inputs: Any) -> None:
        if self.forward is not None:
            self.called.append((self.forward, any(part.training for part in module.modules())))


def step(
    schedule: Any,
    microbatches: Pairs,
    *,
    operation: str = "train",
    kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
    loss_kwargs: Mapping[str, Any] | None = None,
) -> StepResult:
    """Run ``schedule.step`` on ``microbatches``, and return the result for ``whitebox.validate``.

    operation: ``eval`` runs ``schedule.eval``; the caller sets the modules' mode. kwarg_mbs: stage keyword arguments
    per microbatch. loss_kwargs: loss function arguments, from torch 2.13 on. Losses come from the schedule's loss
    function: undivided, unless it divides. With ``schedule.scale_grads``, gradients are divided at the end.
    """
    stages, recorder = stages_of(schedule), Recorder(schedule)
    for stage in stages:
        watch(stage.submod, when=lambda: recorder.forward is not None)
    losses: list[Tensor] = []
    options = {} if loss_kwargs is None else {"loss_kwargs": dict(loss_kwargs)}
    call = schedule.eval if operation == "eval" else schedule.step
    run(call, schedule, microbatches, losses, kwarg_mbs=kwarg_mbs, **options)
    how = Accumulation(late=schedule.scale_grads)
    return StepResult([stage.submod for stage in stages], losses or None, None, recorder.executed, accumulation=how)


def run(call: Callable[..., Any], schedule: Any, microbatches: Pairs, losses: list[Tensor], **options: Any) -> None:
    """Call ``schedule.step`` or ``schedule.eval`` on microbatches directly, without splitting a batch."""
    stages = stages_of(schedule)
    inputs = [pair[0] if isinstance(pair[0], tuple) else (pair[0],) for pair in microbatches]
    fed = inputs if any(stage.is_first for stage in stages) else [()] * len(inputs)
    targets = [target for _, target in microbatches] if any(stage.is_last for stage in stages) else None
    by_microbatches(call, schedule, arg_mbs=fed, target_mbs=targets, losses=losses, return_outputs=False, **options)


def by_microbatches(
    call: Callable[..., Any],
    schedule: Any,
    *,
    arg_mbs: Any = None,
    kwarg_mbs: Any = None,
    target_mbs: Any = None,
    **options: Any,
) -> Any:
    """Call ``schedule.step`` or ``schedule.eval`` with per-microbatch arguments.

    torch accepts them from 2.15 on; earlier versions get their splitting replaced for this call.
    """
    if "arg_mbs" in inspect.signature(call).parameters:
        named = {} if kwarg_mbs is None else {"kwarg_mbs": kwarg_mbs}
        return call(arg_mbs=arg_mbs, target_mbs=target_mbs, **named, **options)
    inner = schedule._step_microbatches

    def step_microbatches(_: Any, kwargs: Any, __: Any, *more: Any, **named: Any) -> Any:
        return inner(arg_mbs, kwargs if kwarg_mbs is None else kwarg_mbs, target_mbs, *more, **named)

    schedule._step_microbatches = step_microbatches
    try:
        return call(**options)
    finally:
        del schedule._step_microbatches
