"""Start of a composed step: what each rank brings, and what all agree upon."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import is_lazy

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.per_rank_globals import belongs_to_rank
from pipeproof.core.observe.sketch import sketch
from pipeproof.core.observe.tensors_in import tensors_in
from pipeproof.records.rank_part import Arrival, RankStages, Run, places_of
from pipeproof.records.record import RankStage, RecordError
from pipeproof.records.step_record import Pairs
from pipeproof.wings.composed.composed import AgainstItself
from pipeproof.wings.composed.link import TARGETS, Data, StageCalls

Each = TypeVar("Each")
Ranks = tuple[int, ...]
_Groups = dict[tuple[Ranks, ...], dict[Ranks, dist.ProcessGroup]]

_groups: WeakKeyDictionary[dist.ProcessGroup, _Groups] = WeakKeyDictionary()  # by the group of all ranks
belongs_to_rank(__name__, "_groups", fresh=lambda _: WeakKeyDictionary())
_ONE_OF_EACH = "replicas of stages must all have the same ones on a rank, and each replica all of them"
_UNSPLIT = "there are replicas, and it is unknown which replica runs which microbatches: pass each replica its own"


@dataclass(frozen=True)
class Peers:
    """The ranks with the same stages as this ``rank``, and a process group for the check.

    ``stages``: each rank's. The group is separate from the job's, and lasts as long as the group over all ranks.
    """

    rank: int
    stages: Sequence[Sequence[int]]
    bound_s: float

    @property
    def ranks(self) -> Ranks:
        """The peers, in order."""
        return self._with(self.stages[self.rank])

    def group(self) -> dist.ProcessGroup | None:
        """Process group over the peers; None for a single peer. Every rank must ask for it."""
        every = tuple(dict.fromkeys(map(self._with, self.stages)))
        if all(len(ranks) < 2 for ranks in every):
            return None
        world, bound = dist.group.WORLD, timedelta(seconds=self.bound_s)
        assert world is not None, "several ranks have the same stages"
        groups = _groups.setdefault(world, {})
        if every not in groups:
            made = {ranks: dist.new_group(list(ranks), timeout=bound) for ranks in every}
            groups[every] = {ranks: group for ranks, group in made.items() if isinstance(group, dist.ProcessGroup)}
        return groups[every].get(self.ranks)

    def all_parts(self, own: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Gather every peer's flat part, with lengths ``counts``; ``own``: this rank's part. Every peer calls this.

        It calls ``all_gather`` with bytes, because some backends lack some types.
        """
        group, flat = self.group(), own.detach().contiguous().flatten()
        if group is None:
            return [flat]
        sent = flat.new_zeros(max(counts))
        sent[: flat.numel()] = flat
        came = [torch.empty_like(sent) for _ in counts]
        dist.all_gather([one.view(torch.uint8) for one in came], sent.view(torch.uint8), group=group)
        return [one[:count] for one, count in zip(came, counts, strict=True)]

    def _with(self, those: Sequence[int]) -> Ranks:
        return tuple(rank for rank, own in enumerate(self.stages) if tuple(own) == tuple(those))


@dataclass(frozen=True)
class ChainStart:
    """What one rank brings: microbatches, if known, in the form of ``Chain``; its stages; its options.

    ``first``: the first name of each weight, by all its names. ``together``: number of ranks with the same microbatches
    and stages cut inside. ``tied``: the names in ``ties=``.
    """

    data: Data | None
    stages: Sequence[int] = ()
    first: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)  # that all ranks must share
    together: int = 1
    tied: Sequence[str] = ()

    @staticmethod
    def of(given: Pairs | None, own: RankStages, against: AgainstItself, *, together: int = 1) -> "ChainStart":
        """Build a rank's contribution, without microbatches. Raises ``RecordError`` if it fits no chain."""
        if given is not None and not given:
            raise RecordError("microbatches is empty: expected those of the step")
        firsts: dict[int, int] = {}
        for stage, module in sorted(own.modules.items()):
            if (of := firsts.setdefault(id(module), stage)) != stage:
                raise RecordError(f"stages {of} and {stage} are one module, with one set of calls: give each its own")
            if unmade := next((name for name, one in module.named_parameters() if is_lazy(one) or one.is_meta), None):
                raise RecordError(f"{unmade} of stage {stage} is made in its first call: check a later step")
        names: dict[int, str] = {}
        tied = {name: group[0] for group in against.contract.ties or () for name in group}
        first = {
            full: tied.get(full) or names.setdefault(id(one), full)
            for stage, module in own.modules.items()
            for name, one in module.named_parameters()
            for full in [own.rename(stage, name)]
        }
        options = {word: getattr(against.contract, word) for word in ("loss_divisor", "loss_scale", "warmup", "ties")}
        options |= {word: getattr(against, word) for word in ("max_norm", "stages", "every")}
        options["accumulation"] = str(against.accumulation)
        # A rank without trainable weights needs no optimizer.
        trains = any(one.requires_grad for module in own.modules.values() for one in module.parameters())
        for word in ("scaler", "build", *(("optimizer", "masters") if trains else ())):
            options[word] = "not given" if getattr(against, word) is None else "given"
        return ChainStart(None, tuple(own.modules), first, options, together, tuple(tied))

    def with_data(self, given: Pairs | None) -> "ChainStart":
        """Return it with microbatches: for each, tensors by number, inputs before targets."""
        if given is None:
            return self
        both = [((0, tensors_in(inputs)), (TARGETS, tensors_in(target))) for inputs, target in given]
        data = [{first + k: sketch(one) for first, part in pair for k, one in enumerate(part)} for pair in both]
        return replace(self, data=data)


@dataclass(frozen=True)
class Agreed:
    """Agreement of all ranks at the start of the step, seen from the rank that has these ``peers``.

    ``run``: a line of ranks for each copy of the model, and its microbatches. ``starts``: each rank's contribution.
    ``alike``: for every line, the first line with the same microbatches. Such lines are parts of one replica, as in
    tensor parallelism; otherwise every line is a replica. ``places``: ranks and stages of each parameter. ``first``: by
    each of its names, the first one, common to all stages that share it. ``known``: these are all names in the model.
    ``only``: the one stage to rerun; None for all.
    """

    run: Run = field(default_factory=lambda: Run((0,), (), (None,)))
    peers: Peers = field(default_factory=lambda: Peers(0, [()], 0.0))
    starts: Sequence[ChainStart] = ()
    alike: tuple[int, ...] = (0,)
    places: Mapping[str, Sequence[RankStage]] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)
    known: bool = False
    only: int | None = None

    @classmethod
    def of(
        cls, run: Run, rank: int, arrivals: Sequence[Arrival], starts: Sequence[ChainStart], *, bound_s: float
    ) -> Self:
        """Derive the agreement for ``rank`` from all contributions to ``run``. ``bound_s``: the longest wait."""
        every, brought = tuple(range(run.count)), dict[int, tuple[str, ...]]()
        for line, one in zip(run.replicas, arrivals, strict=True):
            if one.microbatches is not None:
                brought.setdefault(line, one.microbatches)
        firsts: dict[tuple[str, ...] | None, int] = {}
        alike = tuple(firsts.setdefault(brought.get(line), line) for line in every)
        together = max(one.together for one in starts)
        # Replicas may be given the same data, too: only as many lines as share a cut stage are parts of one.
        parts = together > 1 and all(alike.count(one) == together for one in alike)
        first = {name: one for start in starts for name, one in start.first.items()}
        peers = Peers(rank, [one.stages for one in starts], bound_s)
        return cls(run, peers, starts, alike if parts else every, places_of(arrivals), first)

    @property
    def replicas(self) -> int:
        """Number of replicas of the model."""
        return len({*self.alike})

    @property
    def together(self) -> int:
        """Number of lines in a replica."""
        return self.run.count // self.replicas

    @property
    def line(self) -> int:
        """Number of this rank's line."""
        return self.run.replicas[self.peers.rank]

    @property
    def replica_of_rank(self) -> list[int]:
        """The replica of each rank, by the number of its first line."""
        return [self.alike[line] for line in self.run.replicas]

    def of_parts(self, every: Sequence[Mapping[int, StageCalls]], stage: int, count: int) -> list[tuple[Call, ...]]:
        """Return the last ``count`` calls of ``stage`` on each other rank in this replica."""
        replicas, own = self.replica_of_rank, self.peers.rank
        others = [rank for rank, of in enumerate(replicas) if of == replicas[own] and rank != own]
        calls = [every[rank][stage].calls for rank in others if stage in every[rank]]
        return [one[len(one) - count :] for one in calls if len(one) >= count]

    def of_line(self, every: Sequence[Each], line: int | None = None) -> list[Each]:
        """Select one line's entries from all ranks' entries; by default this rank's line."""
        own = self.line if line is None else line
        return [one for one, of in zip(every, self.run.replicas, strict=True) if of == own]

    def all_pairs(self, given: Sequence[Sequence[Any] | None]) -> list[Any]:
        """Join the microbatches of all replicas, ``given`` by ranks."""
        leading = zip(given, self.run.replicas, strict=True)
        return self.run.together([None if self.alike[line] != line else one for one, line in leading])

    def own_divisor(self, given: float | None, microbatches: int) -> float:
        """Return a replica's divisor for this many microbatches, when gradients are averaged over replicas."""
        return float(microbatches or 1) if given is None else given / self.replicas

    @property
    def problems(self) -> dict[int, str]:
        """Reasons why a replica's ranks form no chain, by rank; empty if they do."""
        first: dict[str, tuple[int, object]] = {}
        ranks: dict[int, list[int]] = {}
        for rank, start in enumerate(self.starts):
            for word, value in start.options.items():
                of, other = first.setdefault(word, (rank, value))
                if value != other:
                    return {rank: f"{word} is {value}, and {other} on rank {of}: give all ranks the same"}
            for stage in start.stages:
                ranks.setdefault(stage, []).append(rank)
        for stage, those in sorted(ranks.items()):
            if len({self.run.replicas[rank] for rank in those}) < len(those):
                return {those[1]: f"stage {stage} is on rank {those[0]}, too; {_ONE_OF_EACH}"}
        names = {name for start in self.starts for name in start.first}
        if lost := [name for start in self.starts for name in start.tied if name not in names]:
            return {0: f"ties has {lost[0]!r}, which no stage holds: give the names that weights have in the model"}
        if gone := sorted({*range(max(ranks, default=0) + 1)} - ranks.keys()):
            return {0: f"no rank has stage {gone[0]}: number the stages from 0, along the data path"}
        return {} if self.replicas == 1 or self.run.apart else {0: _UNSPLIT}

    def data_of(self, line: int) -> Data:
        """Return a line's microbatches."""
        return next(one.data for one in self.of_line(self.starts, line) if one.data is not None)

    @property
    def data(self) -> Data:
        """Microbatches of this rank's line."""
        return self.data_of(self.line) if self.starts else []

    @property
    def last(self) -> int:
        """Number of the last stage."""
        return max(stage for one in self.starts for stage in one.stages)

    @property
    def placement(self) -> list[int]:
        """Rank of every stage in this line."""
        own = self.of_line([(rank, one.stages) for rank, one in enumerate(self.starts)])
        return [rank for _, rank in sorted((stage, rank) for rank, stages in own for stage in stages)]

    @cached_property
    def copies(self) -> dict[str, dict[int, str]]:
        """Names of each shared parameter, by its first name and stage."""
        found: dict[str, dict[int, str]] = {}
        for name, those in self.places.items():
            for _, stage in those:
                found.setdefault(self.first.get(name, name), {}).setdefault(stage, name)
        return {one: names for one, names in found.items() if len(names) > 1}
