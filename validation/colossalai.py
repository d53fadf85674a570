"""ColossalAI: a step that pipeproof starts, or one of a running job."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeproof.foreign.frameworks.colossalai import (
    check_criterion,
    count_of,
    observed,
    step_of,
    type_of,
    validate,
)
from pipeproof.foreign.frameworks.colossalai_whole import (
    COLOSSALAI,
    ColossalAIError,
    Criterion,
    Packed,
    Whole,
    cut,
)
from pipeproof.foreign.frameworks.drawn import contents
from pipeproof.foreign.frameworks.framework import OfMicrobatch
from pipeproof.foreign.frameworks.framework_step import FrameworkStep
from pipeproof.foreign.loss_of_all import LossOfAll
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.frameworks.framework_job import JobStep, checking
from pipeproof.records.frameworks.recording import StepRecording, recording
from pipeproof.records.single_device import SingleDevice
from pipeproof.records.step_record import Pairs

__all__ = ["ColossalAIError", "check_step", "observed", "record_step", "validate"]


def check_step(
    booster: Any,
    model: Any,
    optimizer: Any,
    criterion: Criterion,
    batches: Sequence[Any] | None,
    *,
    reference: Callable[[], nn.Module],
    timeout_s: float = 300.0,
) -> AbstractContextManager[CheckedStep]:
    """A context manager around ``execute_pipeline`` and ``optimizer.step`` of a running job. Every rank enters it.

    After the block there is a ``verdict``. The job keeps its weights, optimizer and random numbers. It goes on in any
    case: what is not covered makes the verdict unknown.

    booster, model, optimizer, criterion: as ``execute_pipeline`` is called with them. batches: what its data iterator
    gives in the step, of this rank's replica: one; or where gradients are accumulated, one for each call. None on a
    rank that does not have them, and not on rank 0. reference: builds the whole model, as it is before it is boosted.
    timeout_s is that of ``check_step``.
    """
    boosted = booster, model, optimizer
    return checking(partial(_step, boosted, criterion, batches, reference), timeout_s=timeout_s)


def record_step(
    booster: Any, model: Any, optimizer: Any, batches: Sequence[Any] | None, path: str, *, timeout_s: float = 300.0
) -> AbstractContextManager[StepRecording]:
    """A context manager around one step of a running job, which writes what the step gave into the file at ``path``.

    booster, model, optimizer, batches: as for ``check_step``; the record has the microbatches that are cut from them.
    All else is as for ``deepspeed.record_step``.
    """
    step = partial(_counted_step, (booster, model, optimizer), batches)
    # Cut when they are wanted: what is wrong with them is the record's.
    microbatches = None if batches is None else _microbatches(booster, batches)
    return recording(step, microbatches, path, framework=COLOSSALAI, timeout_s=timeout_s)


def _counted_step(boosted: tuple[Any, Any, Any], batches: Sequence[Any] | None) -> FrameworkStep:
    """The step of so many batches."""
    if batches is not None:
        COLOSSALAI.listed(batches, what="batches")
    return step_of(*boosted, batches=None if batches is None else len(batches))


def _microbatches(booster: Any, batches: Sequence[Any]) -> Iterator[Any]:
    """What the schedule cuts from them."""
    scheduler = booster.plugin.scheduler
    for batch in batches:
        yield from cut(batch, count_of(scheduler), scheduler.microbatch_size)


def _step(
    boosted: tuple[Any, Any, Any],
    criterion: Criterion,
    batches: Sequence[Any] | None,
    reference: Callable[[], nn.Module],
) -> JobStep:
    check_criterion(criterion)
    step = _counted_step(boosted, batches)
    plugin, given = boosted[0].plugin, batches or ()
    microbatches = [*_microbatches(boosted[0], given)]
    packed = Packed.of(microbatches)

    def of_all(every: Pairs) -> OfMicrobatch:
        known: Any = every  # pairs as they are made below
        return OfMicrobatch(criterion, {tuple(number.tolist()): packed.unpack(inputs) for inputs, number in known})

    def divisor(_: nn.Module, every: Pairs) -> float:
        return len(every) / len(given)  # each call divides by its own microbatches

    replica = int(plugin.pg_mesh.coordinate(plugin.dp_axis))
    pairs = [(packed.pack(one), torch.tensor([replica, number])) for number, one in enumerate(microbatches)]
    build = partial(Whole, reference, packed, type_of(plugin))
    whole = SingleDevice(build, LossOfAll(of_all), loss_divisor=divisor)
    return JobStep(step, None if batches is None else pairs, whole, contents(batches))
