"""Parameters of which ranks have parts: whole again while a stage is run again, and compared in parts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.foreign.handed_back import FlatShard, Gradient
from pipeproof.observers.shards import InShards, Shard, added_up, flat_shard, gathered, held_here, in_flat_parts
from pipeproof.records.rank_part import RankStages
from pipeproof.reference.step import Site, dense
from pipeproof.reference.unsharded import is_flat, is_gathered, is_wrapped, reduced_in, unsharded
from pipeproof.wings.composed.held_gradients import length_in_pieces
from pipeproof.wings.composed.peers import Peers

_GATHERED = (
    "weights that train are whole under fully_shard, as where it keeps them after the backward, or ignored by it: call "
    "reshard() on its modules before gradients()"
)
_FLAT = "stages in FullyShardedDataParallel are not checked so: use fully_shard, or check against a SingleDevice"


Part = tuple[int, str, str]  # a stage, a parameter, and which part of it


def lengths_of(parts: Mapping[Part, float]) -> dict[Site, float]:
    """The norms of gradients, of those of all their ``parts``."""
    every: dict[Site, list[float]] = {}
    for (stage, name, _), one in parts.items():
        every.setdefault((stage, name), []).append(one)
    return {site: math.hypot(*those) for site, those in every.items()}


@dataclass(frozen=True)
class OwnShards:
    """The parts of parameters that this rank has; ``every``: each rank's, in the order of ranks.

    ``gradients``: where its gradients lie, of those that are in other parts than their parameters.
    """

    own: RankStages
    every: Sequence[Mapping[str, Shard]] = field(default_factory=list)
    gradients: dict[str, Shard] = field(default_factory=dict)

    @property
    def obstacle(self) -> str:
        """Why stages cannot be put together, or nothing."""
        if any(is_flat(part) for module in self.own.modules.values() for part in module.modules()):
            return _FLAT
        return _GATHERED if any(map(is_gathered, self.own.modules.values())) else ""

    @property
    def together(self) -> int:
        """Among how many ranks stages are cut inside, as tensor parallelism does: 1, if by ``fully_shard`` alone.

        Its axis is the last one of a mesh: ``fully_shard`` cuts what was cut so before.
        """
        cut = {name for name in self.own.shards if name not in self._wrapped}
        those: list[Any] = [one for name, one in self.parameters.items() if name in cut or _cuts(one) > 1]
        return max((one.device_mesh.size(one.device_mesh.ndim - 1) for one in those), default=1)

    def modules(self, peers: Peers) -> dict[int, nn.Module]:
        """This rank's stages, to be run again: those of which it has parts are made whole.

        Every rank calls this. It takes the memory of the stages' whole weights.
        """
        peers.group()  # by all ranks at once, for to make it is for all
        cut = {name for name, one in self.parameters.items() if isinstance(one, InShards)}
        whole = {name: self._whole(name, peers) for name in sorted(cut)}
        found = dict(self.own.modules)
        for stage, module in self.own.modules.items():
            if any(map(is_wrapped, module.modules())) or any(isinstance(p, InShards) for p in module.parameters()):
                names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
                there = {name: self.own.rename(stage, name) for name in names}
                found[stage] = unsharded(module, {n: whole[full] for n, full in there.items() if full in whole})
        return found

    def sums(self, modules: Mapping[int, nn.Module]) -> dict[int, torch.dtype]:
        """By stage, the type of its parameters, where some are of another one in these ``modules``: they are cast."""
        found = {}
        for stage, module in self.own.modules.items():
            for own, cast in zip(module.parameters(), modules[stage].parameters(), strict=True):
                if own.dtype != cast.dtype:
                    found[stage] = own.dtype
        return found

    @property
    def reduced_in(self) -> dict[str, torch.dtype]:
        """The types in which gradients are reduced, of those parameters that have a wider one."""
        every = [(s, pair) for s, module in self.own.modules.items() for pair in reduced_in(module).items()]
        return {self.own.rename(stage, name): dtype for stage, (name, dtype) in every}

    def named(self, begun: Mapping[int, Mapping[str, bytes]]) -> dict[Site, tuple[str, bytes]]:
        """By stage and the model's name, which part this rank has, and its digest, of what is ``begun`` by stage."""
        every = [
            (stage, self.own.rename(stage, name), one) for stage, own in begun.items() for name, one in own.items()
        ]
        return {(stage, full): (str(self.own.shards.get(full, "")), digest) for stage, full, digest in every}

    @staticmethod
    def flat(gradients: Mapping[str, Gradient]) -> dict[str, Shard]:
        """Where flat parts of ``gradients`` lie, of those that come in such."""
        found = {name: one for name, one in gradients.items() if isinstance(one, FlatShard)}
        return {name: flat_shard(one.start if one.part is not None else 0, one.part) for name, one in found.items()}

    def lying(self, gradients: Mapping[str, Gradient], flat: Sequence[Mapping[str, Shard]]) -> dict[str, Tensor | None]:
        """What this rank has of ``gradients``, with all its elements; where that lies is known from now on.

        ``flat``: the flat parts of all ranks with its stages. Of a gradient that some of them have, it may have none.
        """
        self.gradients.update(self.flat(gradients))
        found = {name: one.part if isinstance(one, FlatShard) else one for name, one in gradients.items()}
        if in_flat_parts(shard for one in flat for shard in one.values()):
            found |= dict.fromkeys(name for name in self.own.places if name not in found)
            self.gradients.update({name: flat_shard(0, None) for name, one in found.items() if one is None})
        return {
            name: None if one is None else dense(held_here(added_up(one, self.parameters.get(name))))
            for name, one in found.items()
        }

    def part(self, name: str, whole: Tensor | None) -> Tensor | None:
        """What this rank has of a ``whole`` gradient."""
        shard = self._shard(name)
        return whole if shard is None or whole is None else shard.of(whole)

    def in_whole(self, name: str, part: Tensor | None, whole: Tensor | None) -> Tensor | None:
        """``whole`` with what this rank has in its place: others' parts are theirs to compare."""
        shard = self._shard(name)
        if shard is None or part is None or whole is None or part.shape != shard.lengths:
            return part
        found = whole.clone()
        (found.view(-1) if shard.flat else found)[shard.index] = part.to(found.dtype)
        return found

    def in_place(self, name: str, part: Tensor | None) -> Tensor | None:
        """``part`` where it lies in the whole gradient, with zeros around it: others have the rest."""
        return None if part is None else self.in_whole(name, part, part.new_zeros(self.own.shapes[name]))

    def alone(self, name: str, whole: Tensor | None) -> Tensor | None:
        """A ``whole`` gradient with zeros in place of what others have of it."""
        return self.in_place(name, self.part(name, whole)) if self.lies(name) else whole

    def sizes(self, stage: int, seen: Mapping[str, Tensor | None]) -> dict[Part, float]:
        """The norms of what this rank has of a stage's gradients, by stage, name and where it lies in all of it."""
        names = [self.own.rename(stage, name) for name, _ in self.own.modules[stage].named_parameters()]
        own = {name: one for name in names if (one := seen.get(name)) is not None}
        return {(stage, name, self.lies(name)): length_in_pieces(one) for name, one in own.items()}

    def lies(self, name: str) -> str:
        """Which part of a gradient this rank has; nothing where it has all."""
        return str(self._shard(name) or "")

    def is_empty(self, name: str) -> bool:
        """Whether this rank has nothing of a gradient."""
        shard = self._shard(name)
        return shard is not None and not shard.count

    def _shard(self, name: str) -> Shard | None:
        return self.gradients.get(name, self.own.shards.get(name))

    @property
    def parameters(self) -> dict[str, Tensor]:
        """This rank's parameters, as the optimizer has them."""
        return {
            self.own.rename(stage, name): one
            for stage, module in self.own.modules.items()
            for name, one in module.named_parameters(remove_duplicate=False)
        }

    @property
    def _wrapped(self) -> set[str]:
        """The parameters that are in a module in which ``fully_shard`` was called, and that are in shards there."""
        around: set[str] = set()
        for stage, module in self.own.modules.items():
            for prefix, part in module.named_modules(remove_duplicate=False):
                if is_wrapped(part):
                    every = part.named_parameters(remove_duplicate=False)
                    inside = (f"{prefix}.{name}" if prefix else name for name, _ in every)
                    around |= {self.own.rename(stage, name) for name in inside}
        return {name for name, one in self.parameters.items() if name in around and isinstance(one, InShards)}

    def _whole(self, name: str, peers: Peers) -> Tensor:
        shards = [self.every[rank].get(name) for rank in peers.ranks]
        shape, here = self.own.shapes[name], held_here(self.parameters[name])
        whole = Shard(tuple((0, length) for length in shape), shape)
        placed = [whole if shard is None else shard for shard in shards]
        parts = peers.all_parts(here, [one.count for one in placed])
        found = gathered([(one, part.view(one.lengths)) for one, part in zip(placed, parts, strict=True)])
        assert found is not None, "this rank has a part"
        return found


def _cuts(tensor: Tensor) -> int:
    """Along how many axes of its mesh a DTensor is cut."""
    return sum(not one.is_replicate() for one in tensor.placements) if isinstance(tensor, InShards) else 0
