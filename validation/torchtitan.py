"""Torchtitan: a step that pipeproof starts, or one of a running job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from pipeproof.core.contract import Contract
from pipeproof.foreign.frameworks.drawn import content_of_rows
from pipeproof.foreign.frameworks.torchtitan import observed, step_of, validate
from pipeproof.foreign.frameworks.torchtitan_whole import (
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
from pipeproof.foreign.loss_of_all import LossOfAll
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.frameworks.framework_job import JobStep, checking
from pipeproof.records.frameworks.recording import StepRecording, recording
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.records.step_record import Pairs

if TYPE_CHECKING:
    from pipeproof.wings.composed import Composed

__all__ = ["TorchtitanError", "check_step", "imports", "observed", "record_step", "validate"]

imports = TORCHTITAN.imports


def check_step(
    pp_schedule: Any,
    model_parts: Sequence[nn.Module],
    microbatches: Sequence[TitanBatch] | None,
    *,
    reference: Callable[[], nn.Module] | Composed,
    loss_fn: LossFunction,
    floors: bool = True,
    timeout_s: float = 300.0,
) -> AbstractContextManager[CheckedStep]:
    """A context manager around one step of a running job: ``pp_schedule.step`` and clipping. Every rank enters it.

    After the block there is a ``verdict``. The job keeps its weights, optimizer and random numbers. It goes on in any
    case: what is not covered makes the verdict unknown.

    pp_schedule, model_parts, loss_fn: as ``pipeline_llm`` gives and is given them. microbatches: pairs of
    ``input_dict`` and labels, those that this rank's replica trains in the step; None on a rank that does not have
    them, and not on rank 0. reference: builds the whole model; or a ``Composed``, for a model too large for one device:
    the ranks of the first and of the last stage then have microbatches. What that is given of a loss is not used.
    floors and timeout_s are those of ``SingleDevice`` and ``check_step``.
    """
    step = partial(_step, pp_schedule, model_parts, microbatches, reference, loss_fn, floors)
    return checking(step, timeout_s=timeout_s, composed=reference if isinstance(reference, StepExpectation) else None)


def record_step(
    pp_schedule: Any,
    model_parts: Sequence[nn.Module],
    microbatches: Sequence[Any] | None,
    path: str,
    *,
    timeout_s: float = 300.0,
) -> AbstractContextManager[StepRecording]:
    """A context manager around one step of a running job, which writes what the step gave into the file at ``path``.

    pp_schedule, model_parts: as for ``check_step``. All else is as for ``deepspeed.record_step``.
    """
    step = partial(step_of, pp_schedule, model_parts)
    return recording(step, microbatches, path, framework=TORCHTITAN, timeout_s=timeout_s)


def _step(
    pp_schedule: Any,
    model_parts: Sequence[nn.Module],
    microbatches: Sequence[TitanBatch] | None,
    reference: Callable[[], nn.Module] | Composed,
    loss_fn: LossFunction,
    floors: bool,
) -> JobStep:
    step = step_of(pp_schedule, model_parts)
    check_loss(loss_fn)
    if microbatches is not None:
        TORCHTITAN.listed(microbatches)
    how = packed(microbatches or ())

    def of_all(every: Pairs) -> UnitLoss:
        return UnitLoss(loss_fn, tokens_in(labels for _, labels in every))

    against: SingleDevice | Composed
    if isinstance(reference, StepExpectation):
        against = replace(reference, loss_fn=LossOfAll(of_all), contract=replace(reference.contract, loss_divisor=1.0))
    else:
        build = partial(WholeTorchTitan, reference, how.names)
        against = SingleDevice(build, LossOfAll(of_all), contract=Contract(loss_divisor=1.0), floors=floors)
    pairs = None if microbatches is None else [(how.pack(given), labels) for given, labels in microbatches]
    given_rows = [content_of_rows([given["input"], labels]) for given, labels in microbatches or ()]
    return JobStep(step, pairs, against, given_rows)
