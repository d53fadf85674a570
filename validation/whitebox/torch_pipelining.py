"""``torch.distributed.pipelining`` under ``whitebox.validate``: what its schedules do, noted and not disturbed.

A user's step builds a schedule of any class, also ``_PipelineScheduleRuntime`` with a CSV, and returns
``step(schedule, microbatches)``. Not noted are actions that a custom function has replaced.
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
from pipeproof.whitebox.handed_back import HandedBack

_ORDERS = ("pipeline_order_with_comms", "pipeline_order")  # of a schedule of several stages on a rank
_CHUNKS = {
    "forward_one_chunk": Kind.FORWARD,
    "backward_one_chunk": Kind.BACKWARD,
    "backward_weight_one_chunk": Kind.BACKWARD_WEIGHT,
}
Pairs = Sequence[tuple[Any, Tensor]]  # inputs (a tensor or a tuple of tensors) and target, for each microbatch


def stages_of(schedule: Any) -> list[Any]:
    """This rank's stages of a schedule of torch's."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def backwards_of(schedule: Any) -> Iterator[tuple[int, str, int]]:
    """Stage, kind (B, I or W) and microbatch of every backward that a schedule of torch's has planned, rank by rank.

    Of a schedule of one stage on each rank nothing is planned: none of torch's own has backwards apart there.
    """
    planned: Mapping[int, Sequence[Any]] = next(
        (found for name in _ORDERS if (found := getattr(schedule, name, None))), {}
    )
    actions = (action for own in planned.values() for action in own if action is not None)
    for one in (each for action in actions for each in (action.sub_actions or (action,))):
        if one.computation_type.value in ("B", "I", "W"):
            yield one.stage_index, one.computation_type.value, one.microbatch_index


class Recorder:
    """Notes every chunk that the stages of ``schedule`` compute from now on, in order.

    ``called`` are the calls of the stages' modules within forwards, and whether they were in training mode; a trial run
    in which torch looks for shapes is none.
    """

    def __init__(self, schedule: Any) -> None:
        self.fence = Fence()
        self.executed: list[Action] = []
        self.called: list[tuple[Action, bool]] = []
        self.forward: Action | None = None  # the one that is under way
        self._stages, self._hooks = stages_of(schedule), list[Any]()
        self._before = {one: {name: vars(one)[name] for name in _CHUNKS if name in vars(one)} for one in self._stages}
        for stage in self._stages:
            for name, kind in _CHUNKS.items():
                setattr(stage, name, self._around(stage, getattr(stage, name), kind))
            note = Hook(stage.submod, self.fence.around(self._note))
            self._hooks.append(stage.submod.register_forward_pre_hook(note))

    def stop(self) -> None:
        """Note nothing more, and leave the stages as they were."""
        for hook in self._hooks:
            hook.remove()
        for stage in self._stages:
            for name in _CHUNKS:
                vars(stage).pop(name, None)
            vars(stage).update(self._before[stage])

    def begin(self) -> None:
        """Forget what was noted so far."""
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
) -> HandedBack:
    """One ``schedule.step`` on ``microbatches``, and what ``whitebox.validate`` wants to have back of it.

    operation: with ``eval`` it is ``schedule.eval``; the modules' mode is the caller's. kwarg_mbs: keyword arguments of
    the stages, for each microbatch. loss_kwargs: those of the loss function, from torch 2.13 on. The losses are those
    that the schedule's loss function returned: undivided, unless that function divides. Where ``schedule.scale_grads``,
    gradients are divided at last.
    """
    stages, recorder = stages_of(schedule), Recorder(schedule)
    for stage in stages:
        watch(stage.submod, when=lambda: recorder.forward is not None)
    losses: list[Tensor] = []
    options = {} if loss_kwargs is None else {"loss_kwargs": dict(loss_kwargs)}
    call = schedule.eval if operation == "eval" else schedule.step
    run(call, schedule, microbatches, losses, kwarg_mbs=kwarg_mbs, **options)
    how = Accumulation(late=schedule.scale_grads)
    return HandedBack([stage.submod for stage in stages], losses or None, None, recorder.executed, accumulation=how)


def run(call: Callable[..., Any], schedule: Any, microbatches: Pairs, losses: list[Tensor], **options: Any) -> None:
    """Call ``schedule.step`` or ``schedule.eval`` on microbatches as they are, without a batch to split."""
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
    """Call ``schedule.step`` or ``schedule.eval`` with what each microbatch has.

    torch takes them so since 2.15; before that its own way of splitting is replaced for this one call.
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
