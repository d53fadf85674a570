"""What ranks bring to a step that is held against itself, and whether it is one chain of stages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.foreign.chain import TARGETS
from pipeproof.foreign.composed import Composed
from pipeproof.foreign.reference_run import check_module, name_of
from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.observers.watching import tensors_in
from pipeproof.records.rank_part import RankStages
from pipeproof.records.record import RecordError
from pipeproof.records.step_record import Pairs
from pipeproof.worlds.drawing import drawing_apart

_ONE_OF_EACH = "replicas of stages must all have the same ones on a rank, and each replica all of them"


@dataclass(frozen=True)
class ChainStart:
    """What one rank brings: microbatches, if it has them, as ``Chain`` has them; its stages; what it was told.

    ``first``: by each name of its parameters, the first one, where its stages hold one under several.
    """

    data: Sequence[Mapping[int, Sketch]] | None
    stages: Sequence[int] = ()
    first: Mapping[str, str] = field(default_factory=dict)
    told: Mapping[str, object] = field(default_factory=dict)

    @staticmethod
    def of(given: Pairs | None, own: RankStages, against: Composed) -> "ChainStart":
        """What a rank with these brings. Raises ``RecordError`` for what is no part of a chain."""
        if given is not None and not given:
            raise RecordError("microbatches is empty: expected those of the step")
        numbers: dict[int, list[int]] = {}
        for stage, module in sorted(own.modules.items()):
            numbers.setdefault(id(module), []).append(stage)
        if same := [those for those in numbers.values() if len(those) > 1]:
            several = " and ".join(map(str, same[0]))
            raise RecordError(f"stages {several} are one module: nobody can tell its calls apart; give each its own")
        names: dict[int, str] = {}
        every = [(stage, *pair) for stage, module in own.modules.items() for pair in module.named_parameters()]
        first = {own.rename(stage, name): (id(one), own.rename(stage, name)) for stage, name, one in every}
        first_of = {name: names.setdefault(*key) for name, key in first.items()}
        told = {"loss_divisor": against.loss_divisor, "max_norm": against.max_norm, "build": bool(against.build)}
        return ChainStart(None, tuple(own.modules), first_of, told)

    def with_data(self, given: Pairs | None) -> "ChainStart":
        """The same with its microbatches."""
        return replace(self, data=None if given is None else [_brought(*pair) for pair in given])


def problems_of(starts: Sequence[ChainStart], replicas: Sequence[int]) -> dict[int, str]:
    """Why what ranks bring is no chain in each of their ``replicas``, by the rank that says so; nothing if it is."""
    first, *others = [start.told for start in starts]
    for rank, told in enumerate(others, start=1):
        if other := [name for name in first if told.get(name) != first[name]]:
            (name, *_) = other
            return {rank: f"{name} is another than on rank 0: give all ranks the same"}
    ranks: dict[int, list[int]] = {}
    for rank, start in enumerate(starts):
        for stage in start.stages:
            ranks.setdefault(stage, []).append(rank)
    for stage, those in sorted(ranks.items()):
        if len({replicas[rank] for rank in those}) < len(those):
            return {those[1]: f"stage {stage} is on rank {those[0]}, too; {_ONE_OF_EACH}"}
    if gone := sorted(set(range(max(ranks, default=0) + 1)) - ranks.keys()):
        return {0: f"nobody has stage {gone[0]}: number the stages from 0, along the data path"}
    return {}


def _brought(inputs: Any, target: Any) -> dict[int, Sketch]:
    every: tuple[tuple[int, list[Tensor]], ...] = ((0, tensors_in(inputs)), (TARGETS, tensors_in(target)))
    return {first + k: sketch(one) for first, part in every for k, one in enumerate(part)}


def names_in(build: Callable[[], nn.Module]) -> dict[str, str]:
    """By each name of a parameter in the model that this builds, which takes no memory, the first one."""
    with drawing_apart(), torch.device("meta"):
        model = build()
    check_module(f"build, {name_of(build)}, returned", model)
    first: dict[int, str] = {}
    return {n: first.setdefault(id(one), n) for n, one in model.named_parameters(remove_duplicate=False)}
