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
from pipeproof.wings.adapters.sight import JobSight
from pipeproof.wings.adapters.step import FrameworkStep
from pipeproof.worlds.output_file import OutputError, OutputFile
from pipeproof.worlds.side_store import Exchange, RanksAbsent, exchange
from pipeproof.worlds.timeout import END_S

_TELLS = "check_step tells which is wrong"
_KINDS = ("weight", "gradient", "updated weight")


@dataclass(frozen=True)
class _RankStep:
    """A rank's part of a step: it sends names, and publishes tensors.

    ``digests``: of each kind of tensor by name; None for a missing gradient. ``shards``: the place of its part in the
    whole, by kind and name. ``shapes``: of whole tensors.
    """

    arrival: Arrival
    losses: tuple[float, ...] = ()
    norm: float | None = None
    digests: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    shards: Mapping[tuple[str, str], Shard] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class StepRecording:
    """A recording of one step. Afterwards rank 0 has the ``record``, or every rank a ``problem``."""

    def __init__(self, own_name: Callable[[str], str], *, timeout_s: float) -> None:
        self.record: Record | None = None
        self.problem = ""
        self._step: FrameworkStep | None = None
        self._microbatches: Iterable[Any] | None = None
        self._own_name, self._timeout_s = own_name, timeout_s
        self._exchange: Exchange = exchange()
        self._tensors: dict[str, dict[str, Tensor | None]] = {kind: {} for kind in _KINDS}
        self._shards: dict[tuple[str, str], Shard] = {}
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

    def stages_moved(self, stages: object) -> frozenset[int]:
        """Return nothing: weights are unknown meanwhile."""
        return frozenset()

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
        mine, laid_out = _RankStep(Arrival({}, None, "")), list[str]()
        with self.noting():
            if not ended:
                raise RecordError("the step raised")
            if self._step is not None:
                self._take_weights(self._step, "updated weight")
                laid_out += self._laid_out()
                mine = self._observe(self._step)
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
        self._exchange.clear(laid_out)
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
        self._tensors[kind][name] = None if part is None else part.detach().to("cpu", copy=True)
        if shard is not None:
            self._shards[kind, name] = shard

    def _laid_out(self) -> Iterator[str]:
        """Publish every tensor of this rank for rank 0; yield their names."""
        for kind, named in self._tensors.items():
            for name, tensor in named.items():
                if tensor is not None:
                    address = _address(kind, name, self._exchange.rank)
                    self._exchange.give(address, tensor)
                    yield address

    def _observe(self, step: FrameworkStep) -> _RankStep:
        held = {
            self._own_name(step.name(stage, name)): stage
            for stage, module in step.stages.items()
            for name, _ in module.named_parameters(remove_duplicate=False)
        }
        given = None if self._microbatches is None else content_digests(self._microbatches)
        digests = {
            kind: {name: None if one is None else digest(one) for name, one in named.items()}
            for kind, named in self._tensors.items()
        }
        arrival = Arrival(held, given, self.problem)
        return _RankStep(arrival, self._losses, self._norm, digests, self._shards, self._shapes)


def _address(kind: str, name: str, rank: int) -> str:
    """Return the address of a rank's published tensor."""
    return f"recorded {kind} {name} of rank {rank}"


@dataclass(frozen=True)
class _AllRanks:
    """All ranks' observations, on rank 0, which may ``take`` the tensors."""

    every: Sequence[_RankStep]
    take: Callable[[str], Tensor]

    def record(self, framework: str) -> Record:
        """Return the record. Raises ``RecordError`` if it is impossible."""
        arrivals = [one.arrival for one in self.every]
        run, wrong = run_of(arrivals)
        if problems := {rank: one.problem for rank, one in enumerate(arrivals) if one.problem} or wrong:
            raise RecordError(describe_problems(problems))
        before, gradients = self._by_name("weight"), self._by_name("gradient")
        moved = any(one.digests["weight"] != one.digests["updated weight"] for one in self.every)
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
        """Return each tensor once; copies on several ranks must agree."""
        holders: dict[str, dict[int, list[int]]] = {}  # ranks with it, by stage
        for rank, one in enumerate(self.every):
            for name in one.digests.get(kind, {}):
                holders.setdefault(name, {}).setdefault(one.arrival.held[name], []).append(rank)
        return {name: self._one(kind, name, [*stages.values()]) for name, stages in holders.items()}

    def _one(self, kind: str, name: str, stages: Sequence[Sequence[int]]) -> Tensor | None:
        """Return the tensor assembled from ranks; with a tied weight, each stage's copy is whole."""
        first, *others = (self._of_stage(kind, name, ranks) for ranks in stages)
        for one in others:
            if one is not first and (one is None or first is None or not same_bits(one, first)):
                raise RecordError(f"copies of {name} have another {kind}: {_TELLS}")
        return first

    def _of_stage(self, kind: str, name: str, ranks: Sequence[int]) -> Tensor | None:
        holders: dict[Shard | None, list[int]] = {}  # None: whole
        for rank in ranks:
            holders.setdefault(self.every[rank].shards.get((kind, name)), []).append(rank)
        if None in holders and len(holders) > 1:
            raise RecordError(f"rank {holders[None][0]} has no part of the {kind} of {name}, and others have: {_TELLS}")
        for members in holders.values():
            self._check_same(kind, name, members)
        shards = [shard for shard in holders if shard is not None]
        if not shards:
            return self._take(kind, name, ranks[0])
        if why := find_untiled(shards):
            raise RecordError(f"what ranks have of the {kind} of {name} is not all of it: {why}; {_TELLS}")
        whole = join_shards([(shard, self._take(kind, name, holders[shard][0])) for shard in shards])
        assert whole is not None, "no part that has elements is None"
        return whole.view(self.every[ranks[0]].shapes[name])

    def _check_same(self, kind: str, name: str, ranks: Sequence[int]) -> None:
        """Raise ``RecordError`` unless ``ranks`` agree."""
        found = {rank: self.every[rank].digests[kind][name] for rank in ranks}
        first = ranks[0]
        if (other := next((rank for rank in ranks if found[rank] != found[first]), None)) is not None:
            raise RecordError(f"ranks {first} and {other} have another {kind} of {name}: a record has one; {_TELLS}")

    def _take(self, kind: str, name: str, rank: int) -> Tensor | None:
        """Take a rank's published tensor."""
        return None if self.every[rank].digests[kind][name] is None else self.take(_address(kind, name, rank))


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
