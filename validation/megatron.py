"""Megatron-core: a step that pipeproof starts, or one of a running job."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeproof.foreign.frameworks.drawn import contents
from pipeproof.foreign.frameworks.framework import loss_of_its_own
from pipeproof.foreign.frameworks.megatron import check_forward_step, observed, step_of, validate
from pipeproof.foreign.frameworks.megatron_whole import (
    MEGATRON,
    ForwardStep,
    MegatronError,
    Whole,
    forget_group,
)
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.frameworks.framework_job import JobStep, checking, pairs_of
from pipeproof.records.frameworks.recording import StepRecording, recording
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_record import Pairs

__all__ = ["MegatronError", "check_step", "observed", "record_step", "validate"]


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
) -> Iterator[CheckedStep]:
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
        with checking(
            partial(_step, chunks, optimizer, microbatches, forward_step, whole), timeout_s=timeout_s
        ) as check:
            yield check
    finally:
        forget_group()


def record_step(
    chunks: Any, optimizer: Any, microbatches: Sequence[Any] | None, path: str, *, timeout_s: float = 300.0
) -> AbstractContextManager[StepRecording]:
    """A context manager around one step of a running job, which writes what the step gave into the file at ``path``.

    chunks, optimizer: as for ``check_step``. All else is as for ``deepspeed.record_step``.
    """
    return recording(partial(step_of, chunks, optimizer), microbatches, path, framework=MEGATRON, timeout_s=timeout_s)


def _step(
    chunks: Any, optimizer: Any, microbatches: Sequence[Any] | None, forward_step: ForwardStep, whole: SingleDevice
) -> JobStep:
    check_forward_step(forward_step)
    step = step_of(chunks, optimizer)
    if microbatches is not None:
        MEGATRON.listed(microbatches)
    return JobStep(step, pairs_of(microbatches, _pair), whole, contents(microbatches))


def _pair(_: int, microbatch: Any) -> tuple[Any, Any]:
    """All of it goes into the reference, which gives the loss."""
    return tuple(microbatch) if isinstance(microbatch, tuple | list) else (microbatch,), torch.empty(0)


def _divisor(model: Whole, microbatches: Pairs) -> float:
    return model.divisor([inputs for inputs, _ in microbatches])
