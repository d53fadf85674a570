"""What ranks bring to a step that is held against itself, and whether it is one chain of stages."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.observers.tensors_in import tensors_in
from pipeproof.records.rank_part import RankStages
from pipeproof.records.record import RecordError
from pipeproof.records.step_record import Pairs
from pipeproof.wings.composed.composed import AgainstItself
from pipeproof.wings.composed.sources import TARGETS
from pipeproof.worlds.side_store import RanksAbsent

_ONE_OF_EACH = "replicas of stages must all have the same ones on a rank, and each replica all of them"


@dataclass(frozen=True)
class ChainStart:
    """What one rank brings: microbatches, if it has them, as ``Chain`` has them; its stages; what it was told.

    ``first``: by each name of its parameters, the first one, where its stages hold one under several. ``together``:
    among so many ranks, which run the same microbatches, its stages are cut inside. ``tied``: the names of weights that
    are in several stages, as it was told.
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
        numbers: dict[int, list[int]] = {}
        for stage, module in sorted(own.modules.items()):
            numbers.setdefault(id(module), []).append(stage)
        if same := [those for those in numbers.values() if len(those) > 1]:
            several = " and ".join(map(str, same[0]))
            raise RecordError(f"stages {several} are one module: nobody can tell its calls apart; give each its own")
        for stage, module in own.modules.items():
            if unmade := next((name for name, one in module.named_parameters() if is_lazy(one) or one.is_meta), None):
                raise RecordError(f"{unmade} of stage {stage} is made in its first call: check a later step")
        names: dict[int, str] = {}
        every = [(stage, *pair) for stage, module in own.modules.items() for pair in module.named_parameters()]
        first = {own.rename(stage, name): (id(one), own.rename(stage, name)) for stage, name, one in every}
        tied = {name: group[0] for group in against.contract.ties or () for name in group}
        first_of = {name: tied.get(name) or names.setdefault(*key) for name, key in first.items()}
        return ChainStart(None, tuple(own.modules), first_of, _told(own, against), together, tuple(tied))

    def with_data(self, given: Pairs | None) -> "ChainStart":
        """The same with its microbatches."""
        return replace(self, data=None if given is None else [_brought(*pair) for pair in given])


def placement_of(stages: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
    """The rank of every stage, of ranks with the numbers of theirs."""
    return [rank for _, rank in sorted((stage, rank) for rank, own in stages for stage in own)]


def problems_of(starts: Sequence[ChainStart], replicas: Sequence[int]) -> dict[int, str]:
    """Why what ranks bring is no chain in each of their ``replicas``, by the rank that says so; nothing if it is."""
    first: dict[str, tuple[int, object]] = {}
    for rank, name, told in [(rank, *pair) for rank, start in enumerate(starts) for pair in start.told.items()]:
        of, other = first.setdefault(name, (rank, told))
        if told != other:
            return {rank: f"{name} is {told}, and {other} on rank {of}: give all ranks the same"}
    ranks: dict[int, list[int]] = {}
    for rank, start in enumerate(starts):
        for stage in start.stages:
            ranks.setdefault(stage, []).append(rank)
    for stage, those in sorted(ranks.items()):
        if len({replicas[rank] for rank in those}) < len(those):
            return {those[1]: f"stage {stage} is on rank {those[0]}, too; {_ONE_OF_EACH}"}
    held = {name for start in starts for name in start.first}
    if lost := [name for start in starts for name in start.tied if name not in held]:
        return {0: f"ties has {lost[0]!r}, which no stage holds: give the names that weights have in the model"}
    if gone := sorted(set(range(max(ranks, default=0) + 1)) - ranks.keys()):
        return {0: f"nobody has stage {gone[0]}: number the stages from 0, along the data path"}
    return {}


@contextmanager
def saying_how_often(against: AgainstItself, rank: int) -> Iterator[None]:
    """Who is waited for in vain may have been told to check other steps: say to what steps this ``rank`` comes."""
    try:
        yield
    except RanksAbsent as absent:
        if not absent.late and rank not in absent.reasons:  # there is a better reason
            raise
        own = f"rank {rank} was told every={against.every}, and all ranks must be told the same"
        raise RanksAbsent({one: f"{why}; {own}" for one, why in absent.reasons.items()}, late=absent.late) from None


def _told(own: RankStages, against: AgainstItself) -> dict[str, object]:
    """What all ranks are to be told alike. A rank that has nothing to train needs no optimizer, and tells of none."""
    told: dict[str, object] = {
        "loss_divisor": against.contract.loss_divisor,
        "loss_scale": against.contract.loss_scale,
        "max_norm": against.max_norm,
        "warmup": against.contract.warmup,
        "ties": against.contract.ties,
        "scaler": _given(against.scaler),
        "build": _given(against.build),
        "stages": against.stages,
        "every": against.every,
        "accumulation": str(against.accumulation),
    }
    if any(one.requires_grad for module in own.modules.values() for one in module.parameters()):
        told |= {"optimizer": _given(against.optimizer), "masters": _given(against.masters)}
    return told


def _given(one: object) -> str:
    return "not given" if one is None else "given"


def _brought(inputs: Any, target: Any) -> dict[int, Sketch]:
    every: tuple[tuple[int, list[Tensor]], ...] = ((0, tensors_in(inputs)), (TARGETS, tensors_in(target)))
    return {first + k: sketch(one) for first, part in every for k, one in enumerate(part)}


def names_in(model: nn.Module) -> dict[str, str]:
    """By each name of a parameter in the model, the first one."""
    first: dict[int, str] = {}
    return {n: first.setdefault(id(one), n) for n, one in model.named_parameters(remove_duplicate=False)}
