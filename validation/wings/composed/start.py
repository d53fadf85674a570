"""What ranks bring to a step that is held against itself, and whether it is one chain of stages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.observers.tensors_in import tensors_in
from pipeproof.records.rank_part import RankStages
from pipeproof.records.record import RecordError
from pipeproof.records.step_record import Pairs
from pipeproof.wings.composed.composed import AgainstItself
from pipeproof.wings.composed.sources import TARGETS

_ONE_OF_EACH = "replicas of stages must all have the same ones on a rank, and each replica all of them"


@dataclass(frozen=True)
class ChainStart:
    """What one rank brings: microbatches, if it has them, as ``Chain`` has them; its stages; what it was told.

    ``first``: by each name of its weights, the first of the same weight. ``together``: so many ranks run the same
    microbatches, and its stages are cut inside. ``tied``: the names in ``ties=``.
    """

    data: Sequence[Mapping[int, Sketch]] | None
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
        _check_modules(own.modules)
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
        """The same with its microbatches."""
        return replace(self, data=None if given is None else [_sketches(*pair) for pair in given])


def placement_of(stages: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
    """The rank of every stage, of ranks with the numbers of theirs."""
    return [rank for _, rank in sorted((stage, rank) for rank, own in stages for stage in own)]


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
    held = {name for start in starts for name in start.first}
    if lost := [name for start in starts for name in start.tied if name not in held]:
        return {0: f"ties has {lost[0]!r}, which no stage holds: give the names that weights have in the model"}
    if gone := sorted({*range(max(ranks, default=0) + 1)} - ranks.keys()):
        return {0: f"nobody has stage {gone[0]}: number the stages from 0, along the data path"}
    return {}


def names_in(model: nn.Module) -> dict[str, str]:
    """By each name of a parameter in the model, the first one."""
    first: dict[int, str] = {}
    return {n: first.setdefault(id(one), n) for n, one in model.named_parameters(remove_duplicate=False)}


def _check_modules(modules: Mapping[int, nn.Module]) -> None:
    stages: dict[int, int] = {}
    for stage, module in sorted(modules.items()):
        if (other := stages.setdefault(id(module), stage)) != stage:
            raise RecordError(f"stages {other} and {stage} are one module, with one set of calls: give each its own")
        if unmade := next((name for name, one in module.named_parameters() if is_lazy(one) or one.is_meta), None):
            raise RecordError(f"{unmade} of stage {stage} is made in its first call: check a later step")


def _told(own: RankStages, against: AgainstItself) -> dict[str, object]:
    """What all ranks must be told alike. A rank that has nothing to train needs no optimizer."""
    told = {word: getattr(against.contract, word) for word in ("loss_divisor", "loss_scale", "warmup", "ties")}
    told |= {word: getattr(against, word) for word in ("max_norm", "stages", "every")}
    told["accumulation"] = str(against.accumulation)
    trains = any(one.requires_grad for module in own.modules.values() for one in module.parameters())
    for word in ("scaler", "build", *(("optimizer", "masters") if trains else ())):
        told[word] = "not given" if getattr(against, word) is None else "given"
    return told


def _sketches(inputs: Any, target: Any) -> dict[int, Sketch]:
    every = ((0, tensors_in(inputs)), (TARGETS, tensors_in(target)))
    return {first + k: sketch(one) for first, part in every for k, one in enumerate(part)}
