"""Nanotron: a step that pipeproof starts, or one of a running job."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.foreign.frameworks.drawn import contents
from pipeproof.foreign.frameworks.framework import loss_of_its_own
from pipeproof.foreign.frameworks.nanotron import check_count, observed, step_of, validate
from pipeproof.foreign.frameworks.nanotron_whole import NANOTRON, Microbatch, NanotronError, WholeNanotron, packed_of
from pipeproof.records.checked_step import CheckedStep
from pipeproof.records.frameworks.framework_job import JobStep, checking
from pipeproof.records.frameworks.recording import StepRecording, recording
from pipeproof.records.single_device import SingleDevice
from pipeproof.worlds.side_store import RanksAbsent, exchange

__all__ = ["NanotronError", "check_step", "imports", "observed", "record_step", "validate"]

imports = NANOTRON.imports


def check_step(
    trainer: Any,
    microbatches: Sequence[Microbatch] | None,
    *,
    reference: Callable[[Any], nn.Module],
    floors: bool = True,
    timeout_s: float = 300.0,
) -> AbstractContextManager[CheckedStep]:
    """A context manager around one ``trainer.training_step`` of a running job. Every rank enters it.

    After the block there is a ``verdict``. The job keeps its weights, optimizer and random numbers. It goes on in any
    case: what is not covered makes the verdict unknown.

    trainer: nanotron's, or what has its model, parallel_context, optimizer and grad_accumulator. microbatches: those
    that this rank's replica trains in the step, as its dataloader gives them: what this rank has a pointer for comes
    from the rank of its pipeline that has it. None on a rank that has nothing of them. reference: builds the model for
    a ``ParallelContext``; it is given one of a single rank. floors and timeout_s are those of ``SingleDevice`` and
    ``check_step``; the second bounds the wait for other ranks' microbatches, too.
    """
    return checking(partial(_step, trainer, microbatches, reference, floors, timeout_s), timeout_s=timeout_s)


@contextmanager
def record_step(
    trainer: Any, microbatches: Sequence[Microbatch] | None, path: str, *, timeout_s: float = 300.0
) -> Iterator[StepRecording]:
    """A context manager around one step of a running job, which writes what the step gave into the file at ``path``.

    trainer, microbatches: as for ``check_step``. All else is as for ``deepspeed.record_step``.
    """
    try:
        joined = _joined(trainer, microbatches, timeout_s) or None
    except Exception:  # no one type: what is given may be anything, and the job goes on
        joined = None  # whose data it is is not known
    with recording(partial(step_of, trainer), joined, path, framework=NANOTRON, timeout_s=timeout_s) as seen:
        yield seen


def _step(
    trainer: Any,
    microbatches: Sequence[Microbatch] | None,
    reference: Callable[[Any], nn.Module],
    floors: bool,
    timeout_s: float,
) -> JobStep:
    joined = _joined(trainer, microbatches, timeout_s)  # first: every rank comes to it, whatever it is given
    if microbatches is not None:
        NANOTRON.listed(microbatches)
    step = step_of(trainer)
    check_count(trainer, joined)
    packed = packed_of(joined)
    whole = SingleDevice(partial(WholeNanotron, reference, packed.names), loss_of_its_own, floors=floors)
    return JobStep(step, [(packed.pack(one), torch.empty(0)) for one in joined], whole, contents(joined))


def _joined(trainer: Any, microbatches: Sequence[Microbatch] | None, timeout_s: float) -> list[dict[str, Any]]:
    """The microbatches of this rank's replica with what the ranks of its pipeline have of each. All ranks call it."""
    replica = _replica(trainer)
    try:
        every = exchange().gather((replica, _held(microbatches)), what="the step's microbatches", bound_s=timeout_s)
    except RanksAbsent as absent:
        raise NanotronError(f"the step's microbatches are not known: {absent}") from None
    joined = [
        dict(one) if isinstance(one, Mapping) else one
        for one in (microbatches if isinstance(microbatches, Sequence) else ())
    ]
    for _, held in (one for one in every if one[0] == replica):
        joined = joined or [{} for _ in held]
        for one, more in zip(joined, held, strict=False):
            if isinstance(one, dict):
                one.update({name: tensor for name, tensor in more.items() if not isinstance(one.get(name), Tensor)})
    return joined


def _replica(trainer: Any) -> int | None:
    """The number of this rank's replica; None where the trainer does not tell."""
    group = getattr(getattr(trainer, "parallel_context", None), "dp_pg", None)
    return None if group is None else int(group.rank())


def _held(microbatches: Any) -> list[dict[str, Tensor]]:
    """The tensors that this rank has of them, on the CPU: they go to ranks that have other devices."""
    if not isinstance(microbatches, Sequence):
        return []
    return [
        {name: tensor.cpu() for name, tensor in one.items() if isinstance(tensor, Tensor)}
        if isinstance(one, Mapping)
        else {}
        for one in microbatches
    ]
