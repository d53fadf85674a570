"""Torchtitan's pipelines under ``whitebox.validate``: where their losses, gradients, norm and names are.

A user's step makes its schedule and model parts by ``pipeline_llm`` as ever and trains inside ``observed``.
``validate`` takes the reference from the same model and loss function. Nothing of torchtitan is imported before one of
these is called.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor, distribute_tensor

from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.foreign.frameworks.framework import Named, Packed, form, unwrapped
from pipeproof.foreign.frameworks.framework_step import FrameworkStep, Observation, observing
from pipeproof.foreign.frameworks.torch_schedule import step_of_schedule
from pipeproof.foreign.frameworks.torchtitan_whole import (
    CHILD,
    TORCHTITAN,
    LossFunction,
    TitanBatch,
    TorchtitanError,
    UnitLoss,
    WholeTorchTitan,
    check_loss,
    packed,
    tokens_in,
)
from pipeproof.foreign.torch_pipelining import backwards_of, stages_of
from pipeproof.foreign.validator import WhiteBox
from pipeproof.reference.accumulation import Accumulation

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")  # of recomputation and torch.compile


def global_name(name: str) -> str:
    """What a parameter of a model part is called in the whole model: the same, but for wrappers around modules."""
    return unwrapped(name, *_WRAPPERS)


def step_of(pp_schedule: Any, model_parts: Sequence[nn.Module]) -> FrameworkStep:
    """The step of this schedule on this rank; raises ``TorchtitanError`` for what is not covered."""
    _check_covered(pp_schedule, model_parts)
    step = step_of_schedule(pp_schedule, model_parts, _in_whole, TorchtitanError)
    return replace(step, accumulation=_accumulation(pp_schedule, model_parts))


def _accumulation(pp_schedule: Any, model_parts: Sequence[nn.Module]) -> Accumulation | None:
    """FSDP adds up and reduces in its ``reduce_dtype``, and casts what comes of it to the type of the weights.

    It does so on one replica, too.
    """
    modules: list[Any] = [one for part in model_parts for one in part.modules() if isinstance(one, FSDPModule)]
    types = {
        (one._get_fsdp_state()._mp_policy.reduce_dtype, parameter.dtype)
        for one in modules
        for parameter in one.parameters()
    }
    if len(types) != 1:
        return None
    ((reduced, own),) = types
    return (
        None
        if reduced in (None, own)
        else Accumulation(reduced, result=own, bundles=bundles(backwards_of(pp_schedule)))
    )


def bundles(backwards: Iterable[tuple[int, str, int]]) -> dict[int, list[list[int]]]:
    """By stage, the microbatches whose gradients of weights torch adds up before FSDP takes them, in their order.

    FSDP takes what there is at each backward through the inputs of a stage, and what is left at the end. The first
    stage has no gradient of its inputs: its backwards of weights go all the way, and FSDP takes each.
    """
    found: dict[int, list[list[int]]] = {}
    for stage, kind, microbatch in backwards:
        own = found.setdefault(stage, [[]])
        if kind != "I":
            own[-1].append(microbatch)
        if kind != "W" or stage == 0:
            own.append([])
    return {stage: [one for one in own if len(one) > 1] for stage, own in found.items()}


def _in_whole(stage: int, name: str) -> str:
    return f"{CHILD}.{global_name(name)}"


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
    TORCHTITAN.listed(microbatches)
    how, tokens = packed(microbatches), tokens_in(labels for _, labels in microbatches) if microbatches else 0
    return TORCHTITAN.judge(whitebox)(
        Named(step, partial(_unpacked, step, how)),
        reference=Named(reference, partial(WholeTorchTitan, reference, how.names)),
        microbatches=[(how.pack(given), labels) for given, labels in microbatches],
        ranks=TORCHTITAN.mesh(ranks),
        loss_fn=UnitLoss(loss_fn, tokens),
        contract=Contract(loss_divisor=1),
    )


def _unpacked(
    step: Callable[[Any, list[TitanBatch]], Any], how: Packed, whole: WholeTorchTitan, microbatches: Sequence[Any]
) -> Any:
    """Run a step on the model itself and microbatches as the dataloader gives them."""
    return step(whole.model, [(how.unpack(inputs), labels) for inputs, labels in microbatches])
