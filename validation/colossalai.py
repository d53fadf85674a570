"""ColossalAI: a step that pipeproof starts, or one of a running job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeproof.core.contract import Contract
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
    WholeColossalAI,
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
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.records.step_record import Pairs

if TYPE_CHECKING:
    from pipeproof.wings.composed import Composed

__all__ = ["ColossalAIError", "check_step", "imports", "observed", "record_step", "validate"]

imports = COLOSSALAI.imports


def check_step(
    booster: Any,
    model: Any,
    optimizer: Any,
    criterion: Criterion,
    batches: Sequence[Any] | None,
    *,
    reference: Callable[[], nn.Module] | Composed,
    timeout_s: float = 300.0,
) -> AbstractContextManager[CheckedStep]:
    """A context manager around ``execute_pipeline`` and ``optimizer.step`` of a running job. Every rank enters it.

    After the block there is a ``verdict``. The job keeps its weights, optimizer and random numbers. It goes on in any
    case: what is not covered makes the verdict unknown.

    booster, model, optimizer, criterion: as ``execute_pipeline`` is called with them. batches: what its data iterator
    gives in the step, of this rank's replica: one; or where gradients are accumulated, one for each call. None on a
    rank that does not have them, and not on rank 0. reference: builds the whole model, as it is before it is boosted;
    or a ``Composed``, for a model too large for one device: the ranks of the first and of the last stage then have
    batches, and there is one. timeout_s is that of ``check_step``.
    """
    boosted, composed = (booster, model, optimizer), reference if isinstance(reference, StepExpectation) else None
    made = partial(_step, boosted, criterion, batches, reference)
    return checking(made, timeout_s=timeout_s, composed=composed)


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


def _against_itself(by: Composed, criterion: Criterion, packed: Packed, model: Any, given: Sequence[Any]) -> Composed:
    """``by``, with ``criterion`` and the names that the whole model has here. Raises ``ColossalAIError``."""
    if len(given) > 1:
        raise ColossalAIError(f"batches has {len(given)}: expected one, where a step is held against itself")
    if model.shared_params and by.build is None:
        raise ColossalAIError(
            "the model shares weights among stages, and nothing tells by which names: give Composed a build=, which "
            "makes the model as it is before it is boosted, on the meta device"
        )
    return replace(
        by, loss_fn=criterion, build=None if by.build is None else partial(WholeColossalAI, by.build, packed)
    )


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
    reference: Callable[[], nn.Module] | Composed,
) -> JobStep:
    check_criterion(criterion)
    step = _counted_step(boosted, batches)
    plugin, given = boosted[0].plugin, batches or ()
    microbatches = [*_microbatches(boosted[0], given)]
    packed = Packed.of(microbatches)
    if isinstance(reference, StepExpectation):
        by = _against_itself(reference, criterion, packed, boosted[1], given)
        every = None if batches is None else [(packed.pack(one), one) for one in microbatches]
        return JobStep(step, every, by, contents(batches))

    def of_all(every: Pairs) -> OfMicrobatch:
        known: Any = every  # pairs as they are made below
        return OfMicrobatch(criterion, {tuple(number.tolist()): packed.unpack(inputs) for inputs, number in known})

    def contract(_: nn.Module, every: Pairs) -> Contract:
        return Contract(loss_divisor=len(every) / len(given))  # each call divides by its own microbatches

    replica = int(plugin.pg_mesh.coordinate(plugin.dp_axis))
    pairs = [(packed.pack(one), torch.tensor([replica, number])) for number, one in enumerate(microbatches)]
    build = partial(WholeColossalAI, reference, packed, type_of(plugin))
    whole = SingleDevice(build, LossOfAll(of_all), contract=contract)
    return JobStep(step, None if batches is None else pairs, whole, contents(batches))
