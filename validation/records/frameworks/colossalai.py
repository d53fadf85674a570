"""ColossalAI, as users reach it at ``pipeproof.colossalai``: a step that pipeproof starts, or one of a running job."""

from collections.abc import Callable, Sequence
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
from pipeproof.records.frameworks.framework_job import JobStep, checking
from pipeproof.records.single_device import LossOfAll, SingleDevice
from pipeproof.records.step_check import StepCheck
from pipeproof.records.step_record import Pairs

__all__ = ["ColossalAIError", "check_step", "observed", "validate"]


def check_step(
    booster: Any,
    model: Any,
    optimizer: Any,
    criterion: Criterion,
    batches: Sequence[Any] | None,
    *,
    reference: Callable[[], nn.Module],
    timeout_s: float = 300.0,
) -> AbstractContextManager[StepCheck]:
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


def _step(
    boosted: tuple[Any, Any, Any],
    criterion: Criterion,
    batches: Sequence[Any] | None,
    reference: Callable[[], nn.Module],
) -> JobStep:
    check_criterion(criterion)
    if batches is not None:
        COLOSSALAI.listed(batches, what="batches")
    step = step_of(*boosted, batches=None if batches is None else len(batches))
    plugin, given = boosted[0].plugin, batches or ()
    count, size = count_of(plugin.scheduler), plugin.scheduler.microbatch_size
    microbatches = [one for batch in given for one in cut(batch, count, size)]
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
