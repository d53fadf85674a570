"""The record of one framework step over all ranks, by the user's names."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from pipeproof.core.measured import versions
from pipeproof.core.observe.shards import Shard, ShardError, find_untiled, join_shards, local_tensor, shard_of
from pipeproof.core.tolerance import same_bits
from pipeproof.core.verdict import describe_error
from pipeproof.records.held_in_common import part_of
from pipeproof.records.rank_part import Arrival, Run, describe_problems, places_of, run_of
from pipeproof.records.record import Record, RecordedOperation, RecordError, content_digests, digest
from pipeproof.records.record_file import write
from pipeproof.whitebox.handed_back import Gradient
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.wings.adapters.framework import Framework
from pipeproof.wings.adapters.step import FrameworkStep, JobSight
from pipeproof.worlds.output_file import OutputError, OutputFile
from pipeproof.worlds.side_store import Exchange, RanksAbsent, exchange
from pipeproof.worlds.timeout import END_S

_TELLS = "check_step tells which is wrong"


_Key = tuple[str, str]  # the kind of a tensor, and its name


@dataclass(frozen=True)
class _RankStep:
    """A rank's part of a step: it sends names, and publishes tensors.

    ``kept``: each tensor's digest, None for a missing gradient, and the place of its part in the whole, None for all.
    ``shapes``: of whole tensors.
    """

    arrival: Arrival
    losses: tuple[float, ...] = ()
    norm: float | None = None
    kept: Mapping[_Key, tuple[str | None, Shard | None]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def digests(self, kind: str) -> dict[str, str | None]:
        """Return the digests of this ``kind`` of tensors by name."""
        return {name: found for (of, name), (found, _) in self.kept.items() if of == kind}


class StepRecording:
    """A recording of one step. Afterwards rank 0 has the ``record``, or every rank a ``problem``."""

    def __init__(self, own_name: Callable[[str], str], *, timeout_s: float) -> None:
        self.record: Record | None = None
        self.problem = ""
        self._step: FrameworkStep | None = None
        self._microbatches: Iterable[Any] | None = None
        self._own_name, self._timeout_s = own_name, timeout_s
        self._exchange: Exchange = exchange()
        self._kept: dict[_Key, tuple[Tensor | None, Shard | None]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._losses: tuple[float, ...] = ()
        self._norm: float | None = None

    def begin(self, step: FrameworkStep, microbatches: Iterable[Any] | None) -> None:
        """Copy the initial weights of ``step``."""
        self._step, self._microbatches = step, microbatches
        self._shapes = {self._own_name(name): tuple(one.shape) for name, one in step.parameters()}
        self._take_weights(step, "weight")

    def gradients(self, named: Mapping[str, Gradient]) -> None:
        """Copy gradients before the optimizer's step."""
        for whole, gradient in named.items():
            name = self._own_name(whole)
            self._keep("gradient", name, *part_of(name, gradient, self._shapes[name]))

    def report(self, *, losses: Sequence[float] | None = None, norm: float | None = None) -> None:
        """Note the losses, or the norm."""
        self._losses = self._losses if losses is None else tuple(losses)
        self._norm = self._norm if norm is None else norm

    def refuse(self, why: str) -> None:
        """Give up, for the reason ``why``."""
        self.problem = self.problem or why

    def miss_norm(self, why: str) -> None:
        """Give up, because a record without the reported norm is incomplete."""
        self.refuse(f"the norm: {why}")

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Catch errors inside: they prevent the record, and not the job."""
        try:
            yield
        except (RecordError, WhiteBoxError, OutputError) as error:
            self.refuse(str(error))
        except Exception as error:  # no one type, and no reason to end a job
            self.refuse(f"recording raised {describe_error(error)}")

    def finish(self, file: OutputFile | None, *, framework: str, ended: bool) -> None:
        """Combine all ranks' observations; rank 0 writes the record. If the step failed, ranks wait only briefly."""
        bound_s = self._timeout_s if ended else min(self._timeout_s, END_S)
        mine, addresses = _RankStep(Arrival({}, None, "")), list[str]()
        with self.noting():
            if not ended:
                raise RecordError("the step raised")
            if self._step is not None:
                self._take_weights(self._step, "updated weight")
                for key, (tensor, _) in self._kept.items():
                    if tensor is not None:
                        addresses.append(_address(key, self._exchange.rank))
                        self._exchange.give(addresses[-1], tensor)
                held = {
                    self._own_name(self._step.name(stage, name)): stage
                    for stage, module in self._step.stages.items()
                    for name, _ in module.named_parameters(remove_duplicate=False)
                }
                given = None if self._microbatches is None else content_digests(self._microbatches)
                kept = {key: (None if one is None else digest(one), shard) for key, (one, shard) in self._kept.items()}
                mine = _RankStep(Arrival(held, given, self.problem), self._losses, self._norm, kept, self._shapes)
        if self.problem:
            mine = _RankStep(Arrival({}, None, self.problem))
        try:
            every = self._exchange.gather(mine, what="the end of the recorded step", bound_s=bound_s)
            with self.noting():
                if self._exchange.rank == 0:
                    take = partial(self._exchange.take, bound_s=self._timeout_s)
                    record = _AllRanks(every, take).record(framework)
                    if file is not None:
                        write(record, file)
                        self.record = record
        except RanksAbsent as absent:
            self.refuse(str(absent))
        try:
            self.problem = self._exchange.finish(self.problem, what="the record", bound_s=bound_s)[0]
        except RanksAbsent as absent:
            self.refuse(str(absent))
        self._exchange.clear(addresses)
        if self.problem and self._exchange.rank == 0:
            warnings.warn(f"the step was not recorded: {self.problem}", stacklevel=5)

    def _take_weights(self, step: FrameworkStep, kind: str) -> None:
        for whole, parameter in step.parameters():
            name = self._own_name(whole)
            try:
                shard = shard_of(parameter)
            except ShardError as error:
                raise RecordError(f"the {kind} {name} cannot be read: {error}") from None
            self._keep(kind, name, local_tensor(parameter), None if shard is None or shard.is_all else shard)

    def _keep(self, kind: str, name: str, part: Tensor | None, shard: Shard | None) -> None:
        """Copy this rank's part. It asks no other rank, because an absent one would block the job."""
        self._kept[kind, name] = None if part is None else part.detach().to("cpu", copy=True), shard


def _address(key: _Key, rank: int) -> str:
    """Return the address of a rank's published tensor."""
    return f"recorded {' '.join(key)} of rank {rank}"


@dataclass(frozen=True)
class _AllRanks:
    """All ranks' observations, on rank 0, which may ``take`` the tensors."""

    every: Sequence[_RankStep]
    take: Callable[[str], Tensor]

    def record(self, framework: str) -> Record:
        """Return the record. Raises ``RecordError`` if it is impossible."""
        arrivals = [one.arrival for one in self.every]
        run, problems = run_of(arrivals)
        if problems:
            raise RecordError(describe_problems(problems))
        before, gradients = self._by_name("weight"), self._by_name("gradient")
        moved = any(one.digests("weight") != one.digests("updated weight") for one in self.every)
        after = self._by_name("updated weight") if moved else {}  # without an optimizer no weight is another
        losses = self._losses(run)
        norms = {rank: one.norm for rank, one in enumerate(self.every) if one.norm is not None}
        if len(set(norms.values())) > 1:
            said = ", ".join(f"rank {rank} {norm:.9g}" for rank, norm in norms.items())
            raise RecordError(f"ranks report different norms of one step: {said}; {_TELLS}")
        operation = RecordedOperation(
            "train",
            run.microbatches,
            tuple(losses[number] for number in sorted(losses)),
            norm=next(iter(norms.values()), None),
            before={name: tensor for name, tensor in before.items() if tensor is not None},
            gradients=gradients,
            parameters={name: tensor for name, tensor in after.items() if tensor is not None},
            contents=run.microbatches,
        )
        dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in operation.before.values()})
        config = {
            "model": f"a step of {framework}",
            "framework": framework,
            "microbatches": len(run.microbatches),
            "ranks": len(self.every),
            "dtype": "+".join(dtypes),
            **versions(),
        }
        return Record("observed", config, (operation,), places_of(arrivals))

    def _losses(self, run: Run) -> dict[int, float]:
        """Return losses by microbatch."""
        losses: dict[int, float] = {}
        for rank, one in enumerate(self.every):
            share = run.shares[rank]
            if one.losses and (share is None or len(share) != len(one.losses)):
                count = "an unknown number of" if share is None else len(share)
                raise RecordError(f"rank {rank} reports {len(one.losses)} losses of {count} microbatches")
            for number, loss in zip(share or (), one.losses, strict=False):
                if losses.setdefault(number, loss) != loss:
                    raise RecordError(
                        f"rank {rank} reports {loss:.9g} for microbatch {number}, another {losses[number]:.9g}"
                    )
        if losses and len(losses) < len(run.microbatches):
            raise RecordError(f"{len(losses)} losses were reported, of {len(run.microbatches)} microbatches")
        return losses

    def _by_name(self, kind: str) -> dict[str, Tensor | None]:
        """Return each tensor once, assembled from ranks; copies must agree. A tied weight is whole on each stage."""
        holders: dict[str, dict[int, list[int]]] = {}  # ranks with it, by stage
        for rank, one in enumerate(self.every):
            for name in one.digests(kind):
                holders.setdefault(name, {}).setdefault(one.arrival.held[name], []).append(rank)
        found: dict[str, Tensor | None] = {}
        for name, stages in holders.items():
            first, *others = (self._of_stage((kind, name), ranks) for ranks in stages.values())
            for other in others:
                if other is not first and (other is None or first is None or not same_bits(other, first)):
                    raise RecordError(f"copies of {name} have another {kind}: {_TELLS}")
            found[name] = first
        return found

    def _of_stage(self, key: _Key, ranks: Sequence[int]) -> Tensor | None:
        (kind, name), holders = key, dict[Shard | None, list[int]]()  # None: whole
        for rank in ranks:
            holders.setdefault(self.every[rank].kept[key][1], []).append(rank)
        if None in holders and len(holders) > 1:
            raise RecordError(f"rank {holders[None][0]} has no part of the {kind} of {name}, and others have: {_TELLS}")
        parts = list[tuple[Shard | None, Tensor | None]]()
        for shard, (first, *others) in holders.items():
            own = self.every[first].kept[key][0]
            for other in others:
                if self.every[other].kept[key][0] != own:
                    raise RecordError(
                        f"ranks {first} and {other} have another {kind} of {name}: a record has one; {_TELLS}"
                    )
            parts.append((shard, None if own is None else self.take(_address(key, first))))
        if None in holders:
            return parts[0][1]
        shards = [(shard, part) for shard, part in parts if shard is not None]
        if why := find_untiled([shard for shard, _ in shards]):
            raise RecordError(f"what ranks have of the {kind} of {name} is not all of it: {why}; {_TELLS}")
        whole = join_shards(shards)
        assert whole is not None, "no part that has elements is None"
        return whole.view(self.every[ranks[0]].shapes[name])


@contextmanager
def recording(
    step: Callable[[], tuple[FrameworkStep, Iterable[Any] | None]],
    path: str,
    *,
    framework: Framework,
    timeout_s: float,
) -> Iterator[StepRecording]:
    """Record the step trained in this block into the file at ``path``, written by rank 0.

    ``step`` returns it and its microbatches. If recording fails, rank 0 warns and writes nothing, and the job goes on.
    """
    observed, name = StepRecording(framework.own_name, timeout_s=timeout_s), ""
    file: OutputFile | None = None
    sight: JobSight | None = None
    with ExitStack() as stack:
        with observed.noting():
            made, microbatches = step()  # first: ranks may speak with one another in it
            file = stack.enter_context(OutputFile(path))
            name = framework.installed
            observed.begin(made, microbatches)
            stack.enter_context(made.watching(looks := JobSight(observed, made)))
            sight = looks
        ended = False
        try:
            yield observed
            if sight is not None:
                sight.end()
            ended = True
        finally:
            observed.finish(file, framework=name, ended=ended)
