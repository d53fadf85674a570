"""PipelineSchedule: the user's object. One training step: forward, backward, norm, clip, optimizer."""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.pipeline import clocks
from pipeproof.pipeline.action import COMPUTE, Action, Kind
from pipeproof.pipeline.boundary import as_tensors
from pipeproof.pipeline.gather import gather
from pipeproof.pipeline.gradients import GradientWork, StageGradients, Tied, clip_factor, norm_of
from pipeproof.pipeline.laws import check
from pipeproof.pipeline.program import Program, lower
from pipeproof.pipeline.program_laws import check as check_program
from pipeproof.pipeline.program_laws import runnable
from pipeproof.pipeline.replicas import stage_of, with_replicas
from pipeproof.pipeline.runtime import Microbatch, Objective, OwnSpan, Run, Runtime
from pipeproof.pipeline.schedule import Schedule, ScheduleError
from pipeproof.pipeline.schedules import build
from pipeproof.pipeline.stage import LossFn, Stage
from pipeproof.pipeline.trace import Profile, Trace, decode, encode
from pipeproof.pipeline.transport import Alone, DistributedTransport, Transport

# How many compute actions ahead of its consumer a receive may be posted, where the transport matches messages by tag:
# any number, since the bytes under way are the bound (mailbox.py).
_EARLY = sys.maxsize


class MicrobatchError(ValueError):
    """Microbatches that a schedule cannot run."""


@dataclass(frozen=True)
class Parts:
    """Parts for a step on this rank; ``PipelineSchedule.wrap`` replaces them: to observe, to plant faults."""

    program: Program
    stages: tuple[Stage, ...]
    transport: Transport
    gradients: GradientWork


@dataclass(frozen=True)
class ScheduleResult:
    """A step's results, equal on every rank except ``profile``, which describes this rank.

    ``losses``: each microbatch's own loss, as ``loss_fn`` returned it; ``loss``: their sum over the divisor, the value
    that was differentiated. ``grad_norm``: the norm over logical parameters before clipping; None for evaluation.
    """

    loss: float
    losses: tuple[float, ...]
    grad_norm: float | None
    profile: Profile


class PipelineSchedule:
    """One rank's end of a pipeline.

    kind: a schedule's name ("1F1B", "gpipe", ...), or a ``Schedule`` or ``Program`` of your own. A program's messages
    are posted in its order; its waits for sends are met when the step ends. n_microbatches: M. stages: this rank's
    modules, in order of their stage numbers. V is their number on each rank. A stage takes and returns a tensor or a
    tuple of tensors. It may be in DDP, or given to ``fully_shard``, over the ranks that hold its replicas. Then its
    gradients are reduced once a step, and each replica trains on microbatches of its own. loss_fn: of output and
    target, a microbatch's scalar loss. Output is the last stage's return value, also a tuple. optimizer: over this
    rank's parameters. Without one, gradients stay after clipping. pp_group: the pipeline's process group (default: the
    world, or no group at all in a single process). A ``Transport`` may take its place, such as
    ``DistributedTransport(group, timeout_s=600)`` if a message may take long. tied: parameters with copies in several
    stages, e.g. ``[{0: "embed.weight", 3: "head.weight"}]``.

    Raises ``ScheduleError`` (a ValueError) for an impossible schedule, or stages that do not fit it.
    """

    def __init__(
        self,
        *,
        kind: str | Schedule | Program,
        n_microbatches: int,
        stages: Sequence[nn.Module],
        loss_fn: LossFn,
        optimizer: torch.optim.Optimizer | None = None,
        pp_group: dist.ProcessGroup | Transport | None = None,
        tied: Sequence[Tied] = (),
    ) -> None:
        transport = _transport(pp_group, stages)
        if isinstance(kind, str):
            kind = build(kind, ranks=transport.n_ranks, microbatches=n_microbatches, virtual=len(stages))
        schedule = kind.schedule if isinstance(kind, Program) else kind
        _fit(schedule, n_microbatches, len(stages), transport)
        program = _program(kind, transport)
        numbered = zip(stages, schedule.stages_of(transport.rank), strict=True)
        split = {action.stage for action in schedule.ranks[transport.rank] if action.kind is Kind.BACKWARD_INPUT}
        own = tuple(stage_of(one, k, splits=k in split, microbatches=n_microbatches) for one, k in numbered)
        gradients = with_replicas(StageGradients(own, transport, schedule.placement, tied), stages)
        self.parts = Parts(program, own, transport, gradients)
        self._own = own
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._spans: Sequence[OwnSpan] = ()
        self._runtime = Runtime(self.parts.program, self.parts.stages, self.parts.transport)

    @property
    def schedule(self) -> Schedule:
        return self.parts.program.schedule

    @property
    def executed(self) -> tuple[Action, ...]:
        """This rank's compute actions in the last step's real order."""
        return tuple(action for action, *_ in self._spans if action.kind in COMPUTE)

    @property
    def undeferred(self) -> dict[int, tuple[str, ...]]:
        """For each stage here with split backwards: work that could not be deferred so far, and why."""
        return {stage.index: tuple(stage.undeferred) for stage in self._own if stage.undeferred}

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The rank's optimizer, if any."""
        return self._optimizer

    def wrap(self, wrap: Callable[[Parts], Parts]) -> "PipelineSchedule":
        """Copy this schedule with parts replaced by ``wrap(parts)``; both share modules and optimizer."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.parts = wrap(self.parts)
        other._runtime = Runtime(other.parts.program, other.parts.stages, other.parts.transport)
        return other

    def train_step(
        self,
        microbatches: Sequence[tuple[object, object]],
        *,
        max_norm: float | None = None,
        loss_divisor: float | None = None,
    ) -> ScheduleResult:
        """Forward, backward, tied gradients, norm, clip, optimizer. Every rank passes the same ``microbatches``.

        Each is a pair (inputs, target); the first stage reads inputs, the last reads targets, the ranks between use
        shapes only. Each loss is divided by ``loss_divisor`` before its backward: by default the number of microbatches
        (mean over microbatches); for a sum over tokens pass the global token count. ``max_norm``: clip the global
        gradient norm to this. Initial gradients count; after the optimizer's step they are cleared, also if a step
        raises. Without an optimizer they stay, for the caller to use and to clear.
        """
        began = clocks.now()
        run, divisor = self._accumulate(microbatches, loss_divisor)
        with self._clear_if_raised():
            self.parts.gradients.reduce_tied()
            losses, squares = self._share(run, self.parts.gradients.squares())
            norm = norm_of(squares)
            if max_norm is not None:
                self.parts.gradients.scale(clip_factor(norm, max_norm))
            if self._optimizer is not None:
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
        return self._result(run, losses, divisor, norm, clocks.now() - began)

    def accumulate(
        self, microbatches: Sequence[tuple[object, object]], *, loss_divisor: float | None = None
    ) -> dict[int, Tensor]:
        """Run forward and backward alone: gradients are added to the parameters'; a later ``train_step`` adds more.

        Returns the losses known on this rank by microbatch: all on the last stage's rank, none elsewhere.
        """
        run, _ = self._accumulate(microbatches, loss_divisor)
        return dict(run.losses)

    @torch.no_grad()
    def eval_step(
        self, microbatches: Sequence[tuple[object, object]], *, loss_divisor: float | None = None
    ) -> ScheduleResult:
        """Run forward alone, modules in evaluation mode; gradients and training mode stay unchanged."""
        began = clocks.now()
        objective, checked = self._objective(loss_divisor), self._check(microbatches)
        modes = [(module, module.training) for stage in self.parts.stages for module in stage.module.modules()]
        for stage in self.parts.stages:
            stage.module.eval()
        try:
            run = self._run(checked, objective, forward_only=True)
        finally:
            for module, mode in modes:
                module.training = mode
        losses, _ = self._share(run, [])
        return self._result(run, losses, objective.divisor, None, clocks.now() - began)

    def profiles(self, profile: Profile) -> list[Profile]:
        """Gather every rank's profile, by rank; every rank must call it with its own."""
        own = dataclasses.astuple(profile)[1:]
        return [Profile(rank, *row) for rank, row in enumerate(gather(self.parts.transport, own))]

    def trace(self) -> Trace:
        """Gather every rank's times from the last step, on a common clock; every rank must call it, and all get it.

        Times are seconds from the first action's beginning. Ranks of one machine share its clock. Another machine's
        times are shifted so that both read the same at the end of an exchange of messages: right to about a message's
        latency. On a GPU an action lasts until it is queued, unless its messages travel through the host.
        """
        transport = self.parts.transport
        gather(transport, ())
        rows = gather(transport, [*clocks.reading(), *encode(self._spans)])
        shifts = clocks.shifts([(machine, now) for machine, now, *_ in rows])
        spans = [decode(rank, row[2:], shift) for rank, (row, shift) in enumerate(zip(rows, shifts, strict=True))]
        return Trace(self.schedule, tuple(spans)).from_zero()

    def _accumulate(
        self, microbatches: Sequence[tuple[object, object]], loss_divisor: float | None
    ) -> tuple[Run, float]:
        objective, checked = self._objective(loss_divisor), self._check(microbatches)
        with self._clear_if_raised():
            return self._run(checked, objective), objective.divisor

    @contextmanager
    def _clear_if_raised(self) -> Iterator[None]:
        """Clear gradients if the block raises. They are incomplete: no later step may build on them."""
        try:
            yield
        except BaseException:
            for stage in self.parts.stages:
                stage.module.zero_grad(set_to_none=True)
            raise

    def _run(self, microbatches: Sequence[Microbatch], objective: Objective, *, forward_only: bool = False) -> Run:
        run = self._runtime.run(microbatches, objective, forward_only=forward_only)
        self._spans = run.spans
        return run

    def _objective(self, loss_divisor: float | None) -> Objective:
        divisor = self.schedule.microbatches if loss_divisor is None else loss_divisor
        if not divisor > 0:
            raise MicrobatchError(f"loss_divisor is {divisor}: expected a number above 0, such as the token count")
        return Objective(self._loss_fn, divisor)

    def _share(self, run: Run, squares: Sequence[float]) -> tuple[tuple[float, ...], list[float]]:
        """Gather all losses, by microbatch, and all sums of squares, from all ranks."""
        losses = [value for m, loss in sorted(run.losses.items()) for value in (m, loss.item())]
        rows = gather(self.parts.transport, [len(losses), *losses, *squares])
        known: dict[int, float] = {}
        every: list[float] = []
        for count, *values in rows:
            pairs, rest = values[: int(count)], values[int(count) :]
            known |= {int(m): loss for m, loss in zip(pairs[::2], pairs[1::2], strict=True)}
            every += rest
        return tuple(known[m] for m in sorted(known)), every

    def _result(
        self, run: Run, losses: tuple[float, ...], divisor: float, norm: float | None, step_s: float
    ) -> ScheduleResult:
        rank = self.parts.transport.rank
        profile = Profile(rank, step_s, run.compute_s, run.communication_s, run.idle_s)
        total = math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)
        return ScheduleResult(total / divisor, losses, norm, profile)

    def _check(self, microbatches: Sequence[tuple[object, object]]) -> list[Microbatch]:
        expected = self.schedule.microbatches
        if len(microbatches) != expected:
            raise MicrobatchError(f"got {len(microbatches)} microbatches: this schedule was built for {expected}")
        checked = [
            Microbatch(as_tensors(inputs, f"the input of microbatch {m}"), target)
            for m, (inputs, target) in enumerate(microbatches)
        ]
        kinds = [[(tensor.dtype, tensor.dim()) for tensor in inputs] for inputs, _ in checked]
        for m, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise MicrobatchError(
                    f"microbatch {m} has {_structure(kind)}, microbatch 0 has {_structure(kinds[0])}: all need the "
                    "same number of tensors, of the same types and numbers of dimensions (sizes may differ)"
                )
        return checked


def _structure(kind: Sequence[tuple[torch.dtype, int]]) -> str:
    return "(" + ", ".join(f"{str(dtype).removeprefix('torch.')} of {dim} dimensions" for dtype, dim in kind) + ")"


def _transport(group: dist.ProcessGroup | Transport | None, stages: Sequence[nn.Module]) -> Transport:
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Alone()
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        devices = [parameter.device for stage in stages for parameter in stage.parameters()]
        return DistributedTransport(group, device=devices[0] if devices else None)
    assert group is not None, "an initialised torch.distributed has a world"
    return group


def _program(kind: Schedule | Program, transport: Transport) -> Program:
    """Lower ``kind`` for ``transport``; a program stays itself. Raises ``LawBroken``, a ScheduleError."""
    if isinstance(kind, Program):
        return check_program(kind, laws=runnable(in_order=transport.in_order))
    return lower(check(kind), early=0 if transport.in_order else _EARLY)


def _fit(schedule: Schedule, n_microbatches: int, n_own: int, transport: Transport) -> None:
    """Raise unless the schedule fits the ranks, stages and microbatches."""
    if schedule.n_ranks != transport.n_ranks:
        raise ScheduleError(
            f"{schedule.name} is for {schedule.n_ranks} ranks, but the process group has {transport.n_ranks}"
        )
    if schedule.microbatches != n_microbatches:
        raise ScheduleError(f"{schedule.name} is for {schedule.microbatches} microbatches, not {n_microbatches}")
    expected = schedule.stages_of(transport.rank)
    if len(expected) != n_own:
        raise ScheduleError(
            f"{schedule.name} has {len(expected)} stages on rank {transport.rank} ({', '.join(map(str, expected))}), "
            f"but {n_own} modules were given"
        )
