"""DeepSpeed: a step that pipeproof starts, or one of a running job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeproof.foreign.frameworks.deepspeed import check_count, check_loss, observed, pair_of, step_of, validate
from pipeproof.foreign.frameworks.deepspeed_whole import DEEPSPEED, DeepSpeedError, WholeDeepSpeed, loss_of_layers
from pipeproof.foreign.frameworks.drawn import contents
from pipeproof.foreign.task import name_of
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.frameworks.framework_job import JobStep, checking, pairs_of
from pipeproof.records.frameworks.recording import StepRecording, recording
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_expectation import StepExpectation

if TYPE_CHECKING:
    from pipeproof.wings.composed import Composed

__all__ = ["DeepSpeedError", "check_step", "imports", "observed", "record_step", "validate"]

imports = DEEPSPEED.imports


def check_step(
    engine: Any,
    microbatches: Sequence[Any] | None,
    *,
    reference: Callable[[], Any] | Composed,
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None,
    floors: bool = True,
    timeout_s: float = 300.0,
) -> AbstractContextManager[CheckedStep]:
    """A context manager around one ``engine.train_batch`` of a running job. Every rank enters it.

    After the block there is a ``verdict``. The job keeps its weights, optimizer and random numbers. It goes on in any
    case: what is not covered makes the verdict unknown.

    engine: as ``deepspeed.initialize`` gives it, of a PipelineModule. microbatches: pairs of inputs and labels, those
    that this rank's replica trains in the step; None on a rank that does not have them, and not on rank 0. reference:
    gives the layers, as PipelineModule takes them; or a ``Composed``, for a model too large for one device: the ranks
    of the first and of the last stage then have microbatches. loss_fn: the PipelineModule's; None: the last layer gives
    the loss. floors and timeout_s are those of ``SingleDevice`` and ``check_step``.
    """

    def whole() -> SingleDevice | Composed:
        own = getattr(getattr(engine, "module", None), "loss_fn", None)
        if loss_fn is None and own is not None:
            raise DeepSpeedError(
                f"loss_fn is None, and the engine's PipelineModule has {name_of(own)}: pass that to the check"
            )
        check_loss(loss_fn)
        if isinstance(reference, StepExpectation):
            return replace(reference, loss_fn=loss_fn)
        build = partial(WholeDeepSpeed, reference, _cast_to(engine))
        return SingleDevice(build, loss_fn or loss_of_layers, floors=floors)

    composed = reference if isinstance(reference, StepExpectation) else None
    return checking(partial(_step, engine, microbatches, whole), timeout_s=timeout_s, composed=composed)


def record_step(
    engine: Any, microbatches: Sequence[Any] | None, path: str, *, timeout_s: float = 300.0
) -> AbstractContextManager[StepRecording]:
    """A context manager around one step of a running job, which records what the step gave. Every rank enters it.

    Rank 0 writes the record into the file at ``path``, for ``pipeproof diff`` and ``compare``. What cannot be recorded
    is a warning there, and nothing is written. The job keeps its weights, optimizer and random numbers, and goes on.

    engine: as for ``check_step``. microbatches: those that this rank's replica trains in the step, in any form: the
    record has digests of their tensors alone, so that it is known which steps are of the same data. None on a rank that
    does not have them. timeout_s bounds each wait for the other ranks.
    """
    return recording(partial(step_of, engine), microbatches, path, framework=DEEPSPEED, timeout_s=timeout_s)


def _step(engine: Any, microbatches: Sequence[Any] | None, whole: Callable[[], SingleDevice | Composed]) -> JobStep:
    step = step_of(engine)
    if microbatches is not None:
        check_count(engine, DEEPSPEED.listed(microbatches))
    return JobStep(step, pairs_of(microbatches, pair_of), whole(), contents(microbatches))


def _cast_to(engine: Any) -> torch.dtype | None:
    """What the engine casts its layers to."""
    enabled = getattr(engine, "bfloat16_enabled", None)
    return torch.bfloat16 if enabled is not None and enabled() else None
