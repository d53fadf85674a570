"""Megatron-core, as users reach it at ``pipeproof.megatron``: a step that pipeproof starts, or one of a running job."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeproof.foreign.framework import loss_of_its_own
from pipeproof.foreign.handed_back import Gradient
from pipeproof.foreign.megatron import cut_up, global_names, gradients_of, losses_noted, observed, stepping, validate
from pipeproof.foreign.megatron_whole import (
    CHILD,
    ForwardStep,
    MegatronError,
    Whole,
    bare,
    check_config,
    core,
    forget_group,
)
from pipeproof.records.framework_job import JobSight, JobStep, checking
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_check import StepCheck
from pipeproof.records.step_record import Pairs

__all__ = ["MegatronError", "check_step", "observed", "validate"]


@contextmanager
def check_step(
    chunks: Any,
    optimizer: Any,
    forward_step: ForwardStep,
    microbatches: Sequence[Any] | None,
    *,
    reference: Callable[[], nn.Module],
    floors: bool = True,
    timeout_s: float = 300.0,
) -> Iterator[StepCheck]:
    """A context manager around one training step of a running job. Every rank enters it.

    After the block there is a ``verdict``. The job keeps its weights, optimizer and random numbers. It goes on in any
    case: what is not covered makes the verdict unknown.

    chunks: as Megatron's schedule is given them. optimizer: Megatron's; None if the block does not step, and gradients
    are what there is at its end. forward_step: as the schedule is given it. microbatches: what its data iterator gives
    in the step, those of this rank's replica; None on a rank that does not have them, and not on rank 0. reference:
    builds the whole model, with a config for one stage. floors and timeout_s are those of ``SingleDevice`` and
    ``check_step``.
    """
    whole = SingleDevice(partial(Whole, reference, forward_step), loss_of_its_own, loss_divisor=_divisor, floors=floors)
    try:
        with checking(partial(_step, chunks, optimizer, microbatches, whole), timeout_s=timeout_s) as check:
            yield check
    finally:
        forget_group()


def _step(chunks: Any, optimizer: Any, microbatches: Sequence[Any] | None, whole: SingleDevice) -> JobStep:
    chunks = list(chunks) if isinstance(chunks, list | tuple) else [chunks]
    check_config(bare(chunks[0]).config)
    if any(cut_up(chunk) for chunk in chunks):
        raise MegatronError(
            "with a distributed optimizer each replica has a part of every gradient: check_step compares whole ones; "
            "set use_distributed_optimizer=False for the checked run, or give the layout to pipeproof.megatron.validate"
        )
    state = core("parallel_state")
    rank, ranks = state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
    stages = {rank + ranks * number: bare(chunk) for number, chunk in enumerate(chunks)}
    names = {stage: global_names(model) for stage, model in stages.items()}
    return JobStep(
        stages,
        None if microbatches is None else [_pair(one) for one in microbatches],
        whole,
        partial(_watching, chunks, optimizer),
        lambda stage, name: f"{CHILD}.{names[stage].get(name, name)}",
    )


@contextmanager
def _watching(chunks: Sequence[Any], optimizer: Any, sight: JobSight) -> Iterator[None]:
    def gradients() -> dict[nn.Parameter, Gradient]:
        return {one: gradient for chunk in chunks for one, gradient in gradients_of(chunk).items()}

    with ExitStack() as stack:
        losses = stack.enter_context(losses_noted())

        def before() -> None:
            sight.gradients(gradients)
            sight.losses(lambda: losses)

        if optimizer is not None:
            stack.enter_context(stepping(optimizer, before=before, after=sight.norm))
        yield
        if optimizer is None:
            before()


def _pair(microbatch: Any) -> tuple[Any, Any]:
    """All of it goes into the reference, which gives the loss."""
    return tuple(microbatch) if isinstance(microbatch, tuple | list) else (microbatch,), torch.empty(0)


def _divisor(model: Whole, microbatches: Pairs) -> float:
    return model.divisor([inputs for inputs, _ in microbatches])
