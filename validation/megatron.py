"""Megatron-core: a step that pipeproof starts, or one of a running job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeproof.core.contract import Contract
from pipeproof.foreign.frameworks.drawn import contents
from pipeproof.foreign.frameworks.framework import loss_of_its_own
from pipeproof.foreign.frameworks.megatron import (
    LossScale,
    check_forward_step,
    chunks_of,
    observed,
    scale_of,
    step_of,
    validate,
)
from pipeproof.foreign.frameworks.megatron_chunk import LossOf, fed
from pipeproof.foreign.frameworks.megatron_whole import (
    MEGATRON,
    ForwardStep,
    MegatronError,
    WholeMegatron,
    bare,
    core,
    forget_group,
)
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.frameworks.framework_job import JobStep, checking, pairs_of
from pipeproof.records.frameworks.recording import StepRecording, recording
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.records.step_record import Pairs

if TYPE_CHECKING:
    from pipeproof.wings.composed import Composed

__all__ = ["MegatronError", "check_step", "imports", "observed", "record_step", "validate"]

imports = MEGATRON.imports


@contextmanager
def check_step(
    chunks: Any,
    optimizer: Any,
    forward_step: ForwardStep,
    microbatches: Sequence[Any] | None,
    *,
    reference: Callable[[], nn.Module] | Composed,
    floors: bool = True,
    timeout_s: float = 300.0,
) -> Iterator[CheckedStep]:
    """A context manager around one training step of a running job. Every rank enters it.

    After the block there is a ``verdict``. The job keeps its weights, optimizer and random numbers. It goes on in any
    case: what is not covered makes the verdict unknown.

    chunks: as Megatron's schedule is given them. optimizer: Megatron's; None if the block does not step, and gradients
    are what there is at its end. forward_step: as the schedule is given it. microbatches: what its data iterator gives
    in the step, those of this rank's replica; None on a rank that does not have them, and not on rank 0. reference:
    builds the whole model, with a config for one stage; or a ``Composed``, for a model too large for one device: the
    ranks of the first and of the last stage then have microbatches. What that is given of a loss is not used. floors
    and timeout_s are those of ``SingleDevice`` and ``check_step``.
    """
    composed = reference if isinstance(reference, StepExpectation) else None
    against = partial(_against, reference, floors)
    step = partial(_step, chunks, optimizer, microbatches, forward_step, against, composed is not None)
    try:
        with ExitStack() as stack:
            if composed is not None:
                stack.enter_context(_all_fed(chunks))
            yield stack.enter_context(checking(step, timeout_s=timeout_s, composed=composed))
    finally:
        forget_group()


def record_step(
    chunks: Any, optimizer: Any, microbatches: Sequence[Any] | None, path: str, *, timeout_s: float = 300.0
) -> AbstractContextManager[StepRecording]:
    """A context manager around one step of a running job, which writes what the step gave into the file at ``path``.

    chunks, optimizer: as for ``check_step``. All else is as for ``deepspeed.record_step``.
    """
    return recording(partial(step_of, chunks, optimizer), microbatches, path, framework=MEGATRON, timeout_s=timeout_s)


@contextmanager
def _all_fed(chunks: Any) -> Iterator[None]:
    """While this is open, what comes into chunks is seen; what are none, the check will say."""
    with ExitStack() as stack:
        with suppress(MegatronError):
            for chunk in map(bare, chunks_of(chunks)):
                stack.enter_context(fed(chunk))
        yield


def _against(
    reference: Callable[[], nn.Module] | Composed, floors: bool, chunks: Any, optimizer: Any, forward_step: ForwardStep
) -> SingleDevice | Composed:
    """What the step is held against."""
    if not isinstance(reference, StepExpectation):
        whole = partial(WholeMegatron, reference, forward_step)
        return SingleDevice(whole, loss_of_its_own, contract=_contract, floors=floors)
    found = chunks_of(chunks)
    if bare(found[0]).config.calculate_per_token_loss:
        raise MegatronError(
            "calculate_per_token_loss is True, and nobody knows the tokens of all: such a step is held against the "
            "whole model alone"
        )
    scaler = LossScale(optimizer) if scale_of(optimizer) != 1.0 else None
    drawn = [*reference.generators, core("tensor_parallel.random").get_cuda_rng_tracker()]
    contract = replace(reference.contract, loss_divisor=None)
    return replace(reference, loss_fn=LossOf(found, forward_step), contract=contract, scaler=scaler, generators=drawn)


def _step(
    chunks: Any,
    optimizer: Any,
    microbatches: Sequence[Any] | None,
    forward_step: ForwardStep,
    against: Callable[[Any, Any, ForwardStep], SingleDevice | Composed],
    composed: bool,
) -> JobStep:
    check_forward_step(forward_step)
    step = step_of(chunks, optimizer, draws=composed)
    if microbatches is not None:
        MEGATRON.listed(microbatches)
    held = against(chunks, optimizer, forward_step)
    pair = _pair_alone if composed else _pair
    return JobStep(step, pairs_of(microbatches, pair), held, contents(microbatches))


def _pair(_: int, microbatch: Any) -> tuple[Any, Any]:
    """All of it goes into the reference, which gives the loss."""
    return tuple(microbatch) if isinstance(microbatch, tuple | list) else (microbatch,), torch.empty(0)


def _pair_alone(_: int, microbatch: Any) -> tuple[Any, Any]:
    """All of it goes into the stages, and into the loss."""
    return _pair(_, microbatch)[0], microbatch


def _contract(model: WholeMegatron, microbatches: Pairs) -> Contract:
    return Contract(loss_divisor=model.divisor([inputs for inputs, _ in microbatches]))
