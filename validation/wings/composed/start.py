"""How a step that is held against itself begins: what each rank brings, and what all of them agree upon."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from torch import nn
from torch.nn.parameter import is_lazy

from pipeproof.core.observe.sketch import sketch
from pipeproof.core.observe.tensors_in import tensors_in
from pipeproof.records.rank_part import Arrival, RankStages, Run, places_of
from pipeproof.records.record import RankStage, RecordError
from pipeproof.records.step_record import Pairs
from pipeproof.wings.composed.composed import AgainstItself
from pipeproof.wings.composed.ranks import Peers, RankLines
from pipeproof.wings.composed.sources import TARGETS, Data

_ONE_OF_EACH = "replicas of stages must all have the same ones on a rank, and each replica all of them"
_UNSPLIT = "there are replicas, and nobody tells whose microbatches are whose: pass each replica those that it runs"


@dataclass(frozen=True)
class ChainStart:
    """What one rank brings: microbatches, if it has them, as ``Chain`` has them; its stages; what it was told.

    ``first``: by each name of its weights, the first of the same weight. ``together``: so many ranks run the same
    microbatches, and its stages are cut inside. ``tied``: the names in ``ties=``.
    """

    data: Data | None
    stages: Sequence[int] = ()
    first: Mapping[str, str] = field(default_factory=dict)
    told: Mapping[str, object] = field(default_factory=dict)
    together: int = 1
    tied: Sequence[str] = ()

    @staticmethod
    def of(given: Pairs | None, own: RankStages, against: AgainstItself, *, together: int = 1) -> "ChainStart":
        """What a rank with these brings. Raises ``RecordError`` for what is no part of a chain."""
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
        return ChainStart(None, tuple(own.modules), first, _told(own, against), together, tuple(tied))

    def with_data(self, given: Pairs | None) -> "ChainStart":
        """The same with its microbatches: of each, its tensors by number, inputs and then targets."""
        if given is None:
            return self
        both = [((0, tensors_in(inputs)), (TARGETS, tensors_in(target))) for inputs, target in given]
        data = [{first + k: sketch(one) for first, part in pair for k, one in enumerate(part)} for pair in both]
        return replace(self, data=data)


@dataclass(frozen=True)
class Agreed:
    """What all ranks agree upon when the step begins, as this one knows it by its ``lines`` and ``peers``.

    ``starts``: what each rank brings. ``places``: the ranks and stages of each parameter; ``first``: by each of its
    names, the first one, which all stages have in common that share it; ``known``: these are all names in the model.
    ``only``: the one stage that is rerun, if not all are.
    """

    lines: RankLines = field(default_factory=RankLines)
    peers: Peers = field(default_factory=lambda: Peers(0, [()], 0.0))
    starts: Sequence[ChainStart] = ()
    places: Mapping[str, Sequence[RankStage]] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)
    known: bool = False
    only: int | None = None

    @classmethod
    def of(
        cls, run: Run, rank: int, arrivals: Sequence[Arrival], starts: Sequence[ChainStart], *, bound_s: float
    ) -> Self:
        """What follows from what ranks bring to ``run``, of which ``rank`` is one. ``bound_s``: how long they wait."""
        lines = RankLines.of(run, rank, arrivals, together=max(one.together for one in starts))
        first = {name: one for start in starts for name, one in start.first.items()}
        return cls(lines, Peers(rank, [one.stages for one in starts], bound_s), starts, places_of(arrivals), first)

    @property
    def problems(self) -> dict[int, str]:
        """Why this is no chain, by the rank that says so; nothing if it is."""
        return problems_of(self.starts, self.lines.run.replicas) or ({} if self.lines.split else {0: _UNSPLIT})

    @property
    def data(self) -> Data:
        """The microbatches of this rank's line."""
        return self.data_of(self.lines.own) if self.starts else []

    def data_of(self, line: int) -> Data:
        """The microbatches of a line."""
        return next(one.data for one in self.lines.of_line(self.starts, line) if one.data is not None)

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return max(stage for one in self.starts for stage in one.stages)

    @property
    def placement(self) -> list[int]:
        """The rank of every stage of this line."""
        own = self.lines.of_line([(rank, one.stages) for rank, one in enumerate(self.starts)])
        return [rank for _, rank in sorted((stage, rank) for rank, stages in own for stage in stages)]

    @property
    def alike(self) -> bool:
        """Whether all replicas have the same number of microbatches."""
        return len({len(one.data) for one in self.starts if one.data is not None}) == 1

    @cached_property
    def copies(self) -> dict[str, dict[int, str]]:
        """By its first name, each parameter that several stages hold: what each of them calls it."""
        found: dict[str, dict[int, str]] = {}
        for name, those in self.places.items():
            for _, stage in those:
                found.setdefault(self.first.get(name, name), {}).setdefault(stage, name)
        return {one: names for one, names in found.items() if len(names) > 1}


def problems_of(starts: Sequence[ChainStart], replicas: Sequence[int]) -> dict[int, str]:
    """Why what ranks bring is no chain in each of their ``replicas``, by the rank that says so; nothing if it is."""
    first: dict[str, tuple[int, object]] = {}
    ranks: dict[int, list[int]] = {}
    for rank, start in enumerate(starts):
        for word, told in start.told.items():
            of, other = first.setdefault(word, (rank, told))
            if told != other:
                return {rank: f"{word} is {told}, and {other} on rank {of}: give all ranks the same"}
        for stage in start.stages:
            ranks.setdefault(stage, []).append(rank)
    for stage, those in sorted(ranks.items()):
        if len({replicas[rank] for rank in those}) < len(those):
            return {those[1]: f"stage {stage} is on rank {those[0]}, too; {_ONE_OF_EACH}"}
    names = {name for start in starts for name in start.first}
    if lost := [name for start in starts for name in start.tied if name not in names]:
        return {0: f"ties has {lost[0]!r}, which no stage holds: give the names that weights have in the model"}
    if gone := sorted({*range(max(ranks, default=0) + 1)} - ranks.keys()):
        return {0: f"nobody has stage {gone[0]}: number the stages from 0, along the data path"}
    return {}


def names_in(model: nn.Module) -> dict[str, str]:
    """By each name of a parameter in the model, the first one."""
    first: dict[int, str] = {}
    return {n: first.setdefault(id(one), n) for n, one in model.named_parameters(remove_duplicate=False)}


def _told(own: RankStages, against: AgainstItself) -> dict[str, Any]:
    """What all ranks must be told alike. A rank that has nothing to train needs no optimizer."""
    told = {word: getattr(against.contract, word) for word in ("loss_divisor", "loss_scale", "warmup", "ties")}
    told |= {word: getattr(against, word) for word in ("max_norm", "stages", "every")}
    told["accumulation"] = str(against.accumulation)
    trains = any(one.requires_grad for module in own.modules.values() for one in module.parameters())
    for word in ("scaler", "build", *(("optimizer", "masters") if trains else ())):
        told[word] = "not given" if getattr(against, word) is None else "given"
    return told
