"""Torchtitan's pipelines under ``whitebox.validate``: where their losses, gradients, norm and names are.

A user's step makes its schedule and model parts by ``pipeline_llm`` as ever and trains inside ``observed``.
``validate`` takes the reference from the same model and loss function. Nothing of torchtitan is imported before one of
these is called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor, distribute_tensor

from pipeproof.foreign.frameworks.framework import Named, form, replaced
from pipeproof.foreign.frameworks.framework_step import FrameworkStep, Observation, Sight, observing
from pipeproof.foreign.frameworks.torchtitan_whole import (
    CHILD,
    TORCHTITAN,
    LossFunction,
    Packed,
    TitanBatch,
    TorchtitanError,
    UnitLoss,
    Whole,
    check_loss,
)
from pipeproof.foreign.handed_back import Gradient
from pipeproof.foreign.torch_pipelining import Recorder, by_microbatches, stages_of
from pipeproof.foreign.validator import WhiteBox
from pipeproof.foreign.validator import validate as validated
from pipeproof.judging.verdict import Verdict

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # of recomputation and torch.compile
_BY_MICROBATCHES = {"arg_mbs", "kwarg_mbs", "target_mbs"}


def global_name(name: str) -> str:
    """What a parameter of a model part is called in the whole model: the same, but for wrappers around modules."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def step_of(pp_schedule: Any, model_parts: Sequence[nn.Module]) -> FrameworkStep:
    """The step of this schedule on this rank; raises ``TorchtitanError`` for what is not covered."""
    _check_covered(pp_schedule, model_parts)
    recorder, losses = Recorder(pp_schedule), list[Tensor]()
    stages = stages_of(pp_schedule)

    def gradients() -> dict[nn.Parameter, Gradient]:
        if not recorder.executed:
            raise TorchtitanError("pp_schedule took no step: call pp_schedule.step in the block")
        return {one: one.grad for part in model_parts for one in part.parameters() if one.requires_grad}

    return FrameworkStep(
        {stage.stage_index: part for stage, part in zip(stages, model_parts, strict=True)},
        lambda stage, name: f"{CHILD}.{global_name(name)}",
        gradients,
        lambda: losses,
        partial(_watching, pp_schedule, recorder, losses),
        when=lambda: recorder.forward is not None,
        actions=lambda: recorder.executed,
    )


@contextmanager
def _watching(schedule: Any, recorder: Recorder, losses: list[Tensor], sight: Sight) -> Iterator[None]:
    """While this is open, note losses, and tell ``sight`` that gradients are about to be clipped, and by which norm."""
    with ExitStack() as stack:
        stack.callback(recorder.stop)
        stack.enter_context(replaced(schedule, "step", _step_noted(schedule, losses)))
        stack.enter_context(replaced(torch.nn.utils, "clip_grads_with_norm_", _telling(sight)))
        yield


@contextmanager
def observed(pp_schedule: Any, model_parts: Sequence[nn.Module], reference: nn.Module) -> Iterator[Observation]:
    """Observe the step that is trained inside this, from the weights of ``reference``.

    pp_schedule, model_parts: as ``pipeline_llm`` gives them. reference: the model that ``validate`` gave to the step.
    Gradients are noted before they are clipped, as torchtitan's ``clip_grad_norm_`` does, and the norm with them.
    Without that, gradients are what there is at ``handed_back``. Raises ``TorchtitanError`` for what is not covered.
    """
    step = step_of(pp_schedule, model_parts)
    load(model_parts, reference)
    seen = Observation(step)
    with observing(seen, step):
        yield seen


def _step_noted(schedule: Any, losses: list[Tensor]) -> Callable[..., Any]:
    """``schedule.step``, noting every loss; it takes microbatches in every version of torch."""
    inner = schedule.step

    @wraps(inner)
    def step(*given: Any, **named: Any) -> Any:
        found = named.get("losses")
        found = [] if found is None else found
        call = partial(by_microbatches, inner, schedule) if _BY_MICROBATCHES & set(named) else inner
        made = call(*given, **{**named, "losses": found})
        losses.extend(loss.detach().clone() for loss in found)
        return made

    return step


def _telling(sight: Sight) -> Callable[..., Any]:
    """The function by which torchtitan clips, and which says so the first time: experts are clipped apart."""
    clip, told = torch.nn.utils.clip_grads_with_norm_, list[Tensor]()

    @wraps(clip)
    def noted(parameters: Any, max_norm: float, total_norm: Tensor, *more: Any, **named: Any) -> Any:
        if not told:
            told.append(total_norm)
            sight.complete()
            sight.norm(total_norm)
        return clip(parameters, max_norm, total_norm, *more, **named)

    return noted


def load(model_parts: Sequence[nn.Module], reference: nn.Module) -> None:
    """Give the model parts the weights of ``reference``, also where each rank has a shard of them.

    Raises ``TorchtitanError`` where the reference has no such parameter, or one of another shape or type.
    """
    weights = dict(reference.named_parameters(remove_duplicate=False))
    every = [one for part in model_parts for one in part.named_parameters()]
    TORCHTITAN.load(((global_name(name), one) for name, one in every if not isinstance(one, DTensor)), reference)
    for name, parameter in every:
        if isinstance(parameter, DTensor):
            weight = weights.get(global_name(name))
            if weight is None or form(weight) != form(parameter):
                ours = "none" if weight is None else f"one of {form(weight)}"
                raise TorchtitanError(f"a model part has {name} of {form(parameter)}, the reference has {ours}")
            placed = distribute_tensor(weight.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
            with torch.no_grad():
                parameter.copy_(placed)


def _check_covered(schedule: Any, model_parts: Any) -> None:
    """Raise ``TorchtitanError`` for what would be judged wrongly."""
    TORCHTITAN.module()
    if not isinstance(schedule, _PipelineSchedule):
        raise TorchtitanError(
            f"pp_schedule is a {type(schedule).__name__}: expected the schedule, which pipeline_llm gives first"
        )
    if not isinstance(model_parts, Sequence) or not all(isinstance(one, nn.Module) for one in model_parts):
        raise TorchtitanError(
            f"model_parts is a {type(model_parts).__name__}: expected the modules, which pipeline_llm gives second"
        )
    if (stages := len(stages_of(schedule))) != len(model_parts):
        raise TorchtitanError(f"model_parts has {len(model_parts)} modules, this rank of pp_schedule {stages} stages")
    for module in (module for part in model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            _check_precision(module)


def _check_precision(module: Any) -> None:
    """Raise ``TorchtitanError`` where FSDP computes in another type than the reference will."""
    computed = module._get_fsdp_state()._mp_policy.param_dtype
    for name, parameter in module.named_parameters():
        if computed not in (None, parameter.dtype):
            raise TorchtitanError(
                f"FSDP computes with {name} in {computed}, the reference in {parameter.dtype}: set "
                "training.mixed_precision_param to the type of the weights for the check"
            )


def validate(
    step: Callable[[Any, list[TitanBatch]], Any],
    *,
    reference: Callable[[], nn.Module],
    loss_fn: LossFunction,
    microbatches: Sequence[TitanBatch],
    ranks: int | Mapping[str, int],
    whitebox: WhiteBox | None = None,
) -> Verdict:
    """The verdict on ``step(model, microbatches)``, which trains what ``pipeline_llm`` made inside ``observed``.

    reference: builds the whole model, seeded, with its weights; the step is given one. loss_fn: as ``pipeline_llm`` is
    given it; it returns a loss and metrics. microbatches: pairs of ``input_dict`` and labels, as the dataloader gives
    them, for all replicas. The loss is divided by the tokens that count in all of them. ranks: how many, all of one
    pipeline; or ``{"pp": 2, "dp": 2}``. whitebox: whose ranks to use, as pytest's fixture; None: own ones.

    Raises ``TorchtitanError``, and what ``whitebox.validate`` raises.
    """
    TORCHTITAN.module()
    check_loss(loss_fn)
    packed = Packed.of(microbatches)
    run = validated if whitebox is None else whitebox.validate
    return run(
        Named(step, partial(_unpacked, step, packed)),
        reference=Named(reference, partial(Whole, reference, packed.names)),
        microbatches=[packed.pack(one) for one in microbatches],
        ranks=TORCHTITAN.mesh(ranks),
        loss_fn=UnitLoss(loss_fn, packed.tokens),
        loss_divisor=1,
    )


def _unpacked(
    step: Callable[[Any, list[TitanBatch]], Any], packed: Packed, whole: Whole, microbatches: Sequence[Any]
) -> Any:
    """Run a step on the model itself and microbatches as the dataloader gives them."""
    return step(whole.model, [packed.unpack(*one) for one in microbatches])
