"""Start of a composed step: what each rank brings, and what all agree upon."""

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
_UNSPLIT = "there are replicas, and it is unknown which replica runs which microbatches: pass each replica its own"


@dataclass(frozen=True)
class ChainStart:
    """What one rank brings: microbatches, if known, in the form of ``Chain``; its stages; its options.

    ``first``: the first name of each weight, by all its names. ``together``: number of ranks with the same microbatches
    and stages cut inside. ``tied``: the names in ``ties=``.
    """

    data: Data | None
    stages: Sequence[int] = ()
    first: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    together: int = 1
    tied: Sequence[str] = ()

    @staticmethod
    def of(given: Pairs | None, own: RankStages, against: AgainstItself, *, together: int = 1) -> "ChainStart":
        """Build a rank's contribution. Raises ``RecordError`` if it fits no chain."""
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
        return ChainStart(None, tuple(own.modules), first, _shared_options(own, against), together, tuple(tied))

    def with_data(self, given: Pairs | None) -> "ChainStart":
        """Return it with microbatches: for each, tensors by number, inputs before targets."""
        if given is None:
            return self
        both = [((0, tensors_in(inputs)), (TARGETS, tensors_in(target))) for inputs, target in given]
        data = [{first + k: sketch(one) for first, part in pair for k, one in enumerate(part)} for pair in both]
        return replace(self, data=data)


@dataclass(frozen=True)
class Agreed:
    """Agreement of all ranks at the start of the step, seen from this rank's ``lines`` and ``peers``.

    ``starts``: each rank's contribution. ``places``: ranks and stages of each parameter. ``first``: by each of its
    names, the first one, common to all stages that share it. ``known``: these are all names in the model. ``only``: the
    one stage to rerun; None for all.
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
        """Derive the agreement for ``rank`` from all contributions to ``run``. ``bound_s``: the longest wait."""
        lines = RankLines.of(run, rank, arrivals, together=max(one.together for one in starts))
        first = {name: one for start in starts for name, one in start.first.items()}
        return cls(lines, Peers(rank, [one.stages for one in starts], bound_s), starts, places_of(arrivals), first)

    @property
    def problems(self) -> dict[int, str]:
        """Reasons why this forms no chain, by rank; empty if it does."""
        return problems_of(self.starts, self.lines.run.replicas) or ({} if self.lines.split else {0: _UNSPLIT})

    @property
    def data(self) -> Data:
        """Microbatches of this rank's line."""
        return self.data_of(self.lines.own) if self.starts else []

    def data_of(self, line: int) -> Data:
        """Return a line's microbatches."""
        return next(one.data for one in self.lines.of_line(self.starts, line) if one.data is not None)

    @property
    def last(self) -> int:
        """Number of the last stage."""
        return max(stage for one in self.starts for stage in one.stages)

    @property
    def placement(self) -> list[int]:
        """Rank of every stage in this line."""
        own = self.lines.of_line([(rank, one.stages) for rank, one in enumerate(self.starts)])
        return [rank for _, rank in sorted((stage, rank) for rank, stages in own for stage in stages)]

    @property
    def alike(self) -> bool:
        """True if all replicas have equally many microbatches."""
        return len({len(one.data) for one in self.starts if one.data is not None}) == 1

    @cached_property
    def copies(self) -> dict[str, dict[int, str]]:
        """Names of each shared parameter, by its first name and stage."""
        found: dict[str, dict[int, str]] = {}
        for name, those in self.places.items():
            for _, stage in those:
                found.setdefault(self.first.get(name, name), {}).setdefault(stage, name)
        return {one: names for one, names in found.items() if len(names) > 1}


def problems_of(starts: Sequence[ChainStart], replicas: Sequence[int]) -> dict[int, str]:
    """Return reasons why a replica's ranks form no chain, by rank; empty if they do."""
    first: dict[str, tuple[int, object]] = {}
    ranks: dict[int, list[int]] = {}
    for rank, start in enumerate(starts):
        for word, value in start.options.items():
            of, other = first.setdefault(word, (rank, value))
            if value != other:
                return {rank: f"{word} is {value}, and {other} on rank {of}: give all ranks the same"}
        for stage in start.stages:
            ranks.setdefault(stage, []).append(rank)
    for stage, those in sorted(ranks.items()):
        if len({replicas[rank] for rank in those}) < len(those):
            return {those[1]: f"stage {stage} is on rank {those[0]}, too; {_ONE_OF_EACH}"}
    names = {name for start in starts for name in start.first}
    if lost := [name for start in starts for name in start.tied if name not in names]:
        return {0: f"ties has {lost[0]!r}, which no stage holds: give the names that weights have in the model"}
    if gone := sorted({*range(max(ranks, default=0) + 1)} - ranks.keys()):
        return {0: f"no rank has stage {gone[0]}: number the stages from 0, along the data path"}
    return {}


def names_in(model: nn.Module) -> dict[str, str]:
    """Map each parameter name in the model to the parameter's first name."""
    first: dict[int, str] = {}
    return {n: first.setdefault(id(one), n) for n, one in model.named_parameters(remove_duplicate=False)}


def _shared_options(own: RankStages, against: AgainstItself) -> dict[str, Any]:
    """Return the options that all ranks must share. A rank without trainable weights needs no optimizer."""
    options = {word: getattr(against.contract, word) for word in ("loss_divisor", "loss_scale", "warmup", "ties")}
    options |= {word: getattr(against, word) for word in ("max_norm", "stages", "every")}
    options["accumulation"] = str(against.accumulation)
    trains = any(one.requires_grad for module in own.modules.values() for one in module.parameters())
    for word in ("scaler", "build", *(("optimizer", "masters") if trains else ())):
        options[word] = "not given" if getattr(against, word) is None else "given"
    return options
