"""The record of one step that a framework ran, on all ranks together: what it gave, by the user's names for it."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from pipeproof.core.measured import versions
from pipeproof.core.tolerance import same_bits
from pipeproof.core.verdict import raised
from pipeproof.foreign.frameworks.framework import Framework
from pipeproof.foreign.frameworks.framework_step import TWO_STEPS, FrameworkStep
from pipeproof.foreign.task import WhiteBoxError
from pipeproof.observers.shards import Shard, ShardError, gathered, held_here, held_whole, shard_of, untiled
from pipeproof.records.frameworks.framework_job import NORM_IN_PARTS
from pipeproof.records.held_in_common import part_of
from pipeproof.records.rank_part import Arrival, Run, places_of, run_of, told
from pipeproof.records.record import Record, RecordedOperation, RecordError, content_digests, digest
from pipeproof.records.record_file import write
from pipeproof.worlds.output_file import OutputError, OutputFile
from pipeproof.worlds.side_store import Exchange, RanksAbsent, exchange
from pipeproof.worlds.timeout import END_S


@dataclass(frozen=True)
class _RankStep:
    """What a rank has of a step: who has which tensors is told, the tensors are laid out.

    ``digests``: of each kind of tensor by name; None in place of a gradient. ``shards``: by kind and name, where its
    part lies in the whole, of those of which it has a part. ``shapes``: those of the whole ones.
    """

    arrival: Arrival
    losses: tuple[float, ...] = ()
    norm: float | None = None
    digests: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    shards: Mapping[tuple[str, str], Shard] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


_NOTHING = FrameworkStep({}, lambda stage, name: name, dict, list, lambda sight: ExitStack())
_TELLS = "check_step tells which is wrong"
KINDS = ("weight", "gradient", "updated weight")


class StepRecording:
    """Sees one step. After it rank 0 has the ``record``; where there is none, ``problem`` says why, on every rank."""

    def __init__(self, microbatches: Iterable[Any] | None, *, framework: Framework, timeout_s: float) -> None:
        self.record: Record | None = None
        self.problem = ""
        self._step, self._microbatches, self._timeout_s = _NOTHING, microbatches, timeout_s
        self._own_name = framework.own_name
        self._exchange: Exchange = exchange()
        self._tensors: dict[str, dict[str, Tensor | None]] = {kind: {} for kind in KINDS}
        self._shards: dict[tuple[str, str], Shard] = {}
        self._losses: tuple[float, ...] = ()
        self._norm: float | None = None
        self._steps = 0

    def begin(self, step: FrameworkStep) -> None:
        """Copy the weights that ``step`` begins with."""
        self._step = step
        self._take_weights("weight")

    def complete(self) -> None:
        """Copy what the optimizer is about to take, and the losses."""
        self._steps += 1
        with self.noting():
            if self._steps > 1:
                raise RecordError(TWO_STEPS)
            gradients = self._step.gradients()
            for name, parameter in self._parameters():
                if parameter in gradients or not parameter.requires_grad:  # of what is frozen there is none
                    shape = tuple(parameter.shape)
                    self._keep("gradient", name, *part_of(name, gradients.get(parameter), shape))
            self._losses = tuple(float(one) for one in self._step.losses())

    def norm(self, norm: Any) -> None:
        """Note the norm that was told."""
        with self.noting():
            here = held_whole(norm.detach()) if isinstance(norm, Tensor) else norm
            if here is None:  # only all ranks together know it, and one that does not come would hold the job up
                raise RecordError(f"the norm: {NORM_IN_PARTS}")
            self._norm = float(here)

    def finish(self, file: OutputFile | None, *, framework: str, ended: bool) -> None:
        """Put together what all ranks saw; rank 0 writes it. Where the step has not ``ended``, nobody waits long."""
        bound_s = self._timeout_s if ended else min(self._timeout_s, END_S)
        mine, laid_out = _RankStep(Arrival({}, None, "")), list[str]()
        with self.noting():
            if not ended:
                raise RecordError("the step raised")
            if self._step.completes_at_its_end(self._steps):
                self.complete()
            self._take_weights("updated weight")
            laid_out += self._laid_out()
            mine = self._seen()
        if self.problem:
            mine = _RankStep(Arrival({}, None, self.problem))
        try:
            every = self._exchange.gather(mine, what="the end of the recorded step", bound_s=bound_s)
            with self.noting():
                if self._exchange.rank == 0:
                    self._write(_AllRanks(every, self._exchange, self._timeout_s).record(framework), file)
        except RanksAbsent as absent:
            self.problem = self.problem or str(absent)
        try:
            self.problem = self._exchange.finish(self.problem, what="the record", bound_s=bound_s)[0]
        except RanksAbsent as absent:
            self.problem = self.problem or str(absent)
        self._exchange.clear(laid_out)
        if self.problem and self._exchange.rank == 0:
            warnings.warn(f"the step was not recorded: {self.problem}", stacklevel=5)

    def _write(self, record: Record, file: OutputFile | None) -> None:
        if file is not None:
            write(record, file)
            self.record = record

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep what is raised inside: it is the record that cannot be, and not the job."""
        try:
            yield
        except (RecordError, WhiteBoxError, OutputError) as error:
            self.problem = self.problem or str(error)
        except Exception as error:  # no one type, and no reason to end a job
            self.problem = self.problem or f"recording raised {raised(error)}"

    def _take_weights(self, kind: str) -> None:
        for name, parameter in self._parameters():
            try:
                shard = shard_of(parameter)
            except ShardError as error:
                raise RecordError(f"the {kind} {name} cannot be read: {error}") from None
            self._keep(kind, name, held_here(parameter), None if shard is None or shard.is_all else shard)

    def _keep(self, kind: str, name: str, part: Tensor | None, shard: Shard | None) -> None:
        """Keep a copy of what this rank has. No other rank is asked: one that does not come would hold the job up."""
        self._tensors[kind][name] = None if part is None else part.detach().to("cpu", copy=True)
        if shard is not None:
            self._shards[kind, name] = shard

    def _laid_out(self) -> Iterator[str]:
        """Lay out every tensor of this rank for rank 0; the names of all."""
        for kind, named in self._tensors.items():
            for name, tensor in named.items():
                if tensor is not None:
                    address = address_of(kind, name, self._exchange.rank)
                    self._exchange.give(address, tensor)
                    yield address

    def _seen(self) -> _RankStep:
        held = {name: stage for stage, name in self._names()}
        given = None if self._microbatches is None else content_digests(self._microbatches)
        digests = {
            kind: {name: None if one is None else digest(one) for name, one in named.items()}
            for kind, named in self._tensors.items()
        }
        shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters()}
        return _RankStep(Arrival(held, given, self.problem), self._losses, self._norm, digests, self._shards, shapes)

    def _names(self) -> Iterator[tuple[int, str]]:
        for stage, module in self._step.stages.items():
            for name, _ in module.named_parameters(remove_duplicate=False):
                yield stage, self._own_name(self._step.name(stage, name))

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._step.parameters():
            yield self._own_name(name), parameter


def address_of(kind: str, name: str, rank: int) -> str:
    """Under what a rank lays out a tensor."""
    return f"recorded {kind} {name} of rank {rank}"


@dataclass(frozen=True)
class _AllRanks:
    """What all ranks saw, on rank 0, which may take the tensors."""

    every: Sequence[_RankStep]
    exchange: Exchange
    timeout_s: float

    def record(self, framework: str) -> Record:
        """The record of it. Raises ``RecordError`` for what is none."""
        arrivals = [one.arrival for one in self.every]
        run, wrong = run_of(arrivals)
        if problems := {rank: one.problem for rank, one in enumerate(arrivals) if one.problem} or wrong:
            raise RecordError(told(problems))
        before, gradients = self._named("weight"), self._named("gradient")
        after = self._named("updated weight") if self._moved() else {}
        losses = self._losses(run)
        norms = {rank: one.norm for rank, one in enumerate(self.every) if one.norm is not None}
        if len(set(norms.values())) > 1:
            said = ", ".join(f"rank {rank} {norm:.9g}" for rank, norm in norms.items())
            raise RecordError(f"ranks told other norms of one step: {said}; {_TELLS}")
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

    def _moved(self) -> bool:
        """Whether any weight is another after the step; in a block without an optimizer none is."""
        return any(one.digests["weight"] != one.digests["updated weight"] for one in self.every)

    def _losses(self, run: Run) -> dict[int, float]:
        """By the number of the microbatch."""
        losses: dict[int, float] = {}
        for rank, one in enumerate(self.every):
            share = run.shares[rank]
            if one.losses and (share is None or len(share) != len(one.losses)):
                count = "an unknown number of" if share is None else len(share)
                raise RecordError(f"rank {rank} told {len(one.losses)} losses of {count} microbatches")
            for number, loss in zip(share or (), one.losses, strict=False):
                if losses.setdefault(number, loss) != loss:
                    raise RecordError(
                        f"rank {rank} told {loss:.9g} of microbatch {number}, another {losses[number]:.9g}"
                    )
        if losses and len(losses) < len(run.microbatches):
            raise RecordError(f"{len(losses)} losses were told, of {len(run.microbatches)} microbatches")
        return losses

    def _named(self, kind: str) -> dict[str, Tensor | None]:
        """Each tensor once; what several ranks have of it has to be the same."""
        holders: dict[str, list[int]] = {}
        for rank, one in enumerate(self.every):
            for name in one.digests.get(kind, {}):
                holders.setdefault(name, []).append(rank)
        return {name: self._one(kind, name, ranks) for name, ranks in holders.items()}

    def _one(self, kind: str, name: str, ranks: Sequence[int]) -> Tensor | None:
        if any((kind, name) in self.every[rank].shards for rank in ranks):
            return self._joined(kind, name, ranks)
        self._check_same(kind, name, ranks)
        return self._taken(kind, name, ranks[0])

    def _check_same(self, kind: str, name: str, ranks: Sequence[int]) -> None:
        """Raise ``RecordError`` where ``ranks`` do not have the same."""
        found = {rank: self.every[rank].digests[kind][name] for rank in ranks}
        first = ranks[0]
        other = next((rank for rank in ranks if found[rank] != found[first]), None)
        if other is not None:
            raise RecordError(f"ranks {first} and {other} have another {kind} of {name}: a record has one; {_TELLS}")

    def _joined(self, kind: str, name: str, ranks: Sequence[int]) -> Tensor | None:
        """What ranks have parts of; each stage's, which copies of a tied weight make several, is whole."""
        stages: dict[int, list[int]] = {}
        for rank in ranks:
            stages.setdefault(self.every[rank].arrival.held[name], []).append(rank)
        first, *others = (self._of_stage(kind, name, members) for members in stages.values())
        if not all(same_bits(one, first) for one in others):
            raise RecordError(f"copies of {name} have another {kind}: {_TELLS}")
        return first

    def _of_stage(self, kind: str, name: str, ranks: Sequence[int]) -> Tensor:
        holders: dict[Shard, list[int]] = {}
        for rank in ranks:
            shard = self.every[rank].shards.get((kind, name))
            if shard is None:
                raise RecordError(f"rank {rank} has no part of the {kind} of {name}, and others have: {_TELLS}")
            holders.setdefault(shard, []).append(rank)
        for members in holders.values():
            self._check_same(kind, name, members)
        if why := untiled([*holders]):
            raise RecordError(f"what ranks have of the {kind} of {name} is not all of it: {why}; {_TELLS}")
        whole = gathered([(shard, self._taken(kind, name, members[0])) for shard, members in holders.items()])
        assert whole is not None, "no part that has elements is None"
        return whole.view(self.every[ranks[0]].shapes[name])

    def _taken(self, kind: str, name: str, rank: int) -> Tensor | None:
        """What this rank has of it."""
        return None if self.every[rank].digests[kind][name] is None else self._take(kind, name, rank)

    def _take(self, kind: str, name: str, rank: int) -> Tensor:
        return self.exchange.take(address_of(kind, name, rank), bound_s=self.timeout_s)


@contextmanager
def recording(
    step: Callable[[], FrameworkStep],
    microbatches: Iterable[Any] | None,
    path: str,
    *,
    framework: Framework,
    timeout_s: float,
) -> Iterator[StepRecording]:
    """Record the step that is trained inside this into the file at ``path``, which rank 0 writes.

    What cannot be recorded is a warning on rank 0. Nothing is written then, and the job goes on.
    """
    seen, name = StepRecording(microbatches, framework=framework, timeout_s=timeout_s), ""
    file: OutputFile | None = None
    with ExitStack() as stack:
        with seen.noting():
            file = stack.enter_context(OutputFile(path))
            made, name = step(), framework.installed
            seen.begin(made)
            stack.enter_context(made.watching(seen))
        ended = False
        try:
            yield seen
            ended = True
        finally:
            seen.finish(file, framework=name, ended=ended)
