"""Sharded parameters: whole during a stage's rerun, compared part by part."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from pipeproof.core.observe.shards import (
    InShards,
    Shard,
    add_partial,
    flat_shard,
    in_flat_parts,
    join_shards,
    local_tensor,
)
from pipeproof.records.rank_part import RankStages
from pipeproof.reference.step import Site, dense
from pipeproof.reference.unsharded import is_flat, is_gathered, is_wrapped, reduction_types, under_fully_shard, unshard
from pipeproof.whitebox.handed_back import FlatShard, Gradient
from pipeproof.wings.composed.start import Peers

_GATHERED = (
    "weights that train are whole under fully_shard, as where it keeps them after the backward, or ignored by it: call "
    "reshard() on its modules before gradients()"
)
_FLAT = "stages in FullyShardedDataParallel are not checked so: use fully_shard, or check against a SingleDevice"
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class OwnShards:
    """The parts of parameters on this rank, by its ``stages``; ``every``: each rank's parts, in order.

    ``gradients``: places of gradients that are cut differently from their parameters.
    """

    stages: RankStages
    every: Sequence[Mapping[str, Shard]] = field(default_factory=list)
    gradients: dict[str, Shard] = field(default_factory=dict)

    @property
    def obstacle(self) -> str:
        """Why stages cannot be assembled; empty if they can."""
        if any(is_flat(part) for module in self.stages.modules.values() for part in module.modules()):
            return _FLAT
        return _GATHERED if any(map(is_gathered, self.stages.modules.values())) else ""

    @property
    def together(self) -> int:
        """Number of ranks that share a stage, as in tensor parallelism; 1 with ``fully_shard`` alone.

        Their axis is a mesh's last, because ``fully_shard`` cuts in front.
        """
        wrapped = self._rename(under_fully_shard)
        found = [1]
        for name, one in self.parameters.items():
            if isinstance(one, InShards):
                axes = sum(not placement.is_replicate() for placement in one.placements)
                if axes > 1 or (name in self.stages.shards and name not in wrapped):
                    found.append(one.device_mesh.size(one.device_mesh.ndim - 1))
        return max(found)

    def modules(self, peers: Peers) -> dict[int, nn.Module]:
        """Return this rank's stages for the rerun, with sharded parameters assembled.

        Every rank calls this. It needs memory for the stages' whole weights.
        """
        peers.group()  # by all ranks at once, for to make it is for all
        cut = sorted(name for name, one in self.parameters.items() if isinstance(one, InShards))
        whole = dict[str, Tensor]()
        for name in cut:
            shape, here = self.stages.shapes[name], local_tensor(self.parameters[name])
            every = Shard(tuple((0, length) for length in shape), shape)
            placed = [self.every[rank].get(name, every) for rank in peers.ranks]
            parts = zip(placed, peers.all_parts(here, [one.count for one in placed]), strict=True)
            joined = join_shards([(one, part.view(one.lengths)) for one, part in parts])
            assert joined is not None, "this rank has a part"
            whole[name] = joined
        found = dict(self.stages.modules)
        for stage, module in self.stages.modules.items():
            names = {name: self.stages.rename(stage, name) for name, _ in _name_parameters(module)}
            if any(map(is_wrapped, module.modules())) or any(full in whole for full in names.values()):
                found[stage] = unshard(module, {name: whole[full] for name, full in names.items() if full in whole})
        return found

    def sums(self, modules: Mapping[int, nn.Module]) -> dict[int, torch.dtype]:
        """Return the type of parameters by stage, if some ``modules`` have another and are cast."""
        return {
            stage: own.dtype
            for stage, module in self.stages.modules.items()
            for own, cast in zip(module.parameters(), modules[stage].parameters(), strict=True)
            if own.dtype != cast.dtype
        }

    @property
    def reduced_in(self) -> dict[str, torch.dtype]:
        """Types of gradient reduction, for parameters with a wider type."""
        return self._rename(reduction_types)

    def digests_by_name(self, begun: Mapping[int, Mapping[str, bytes]]) -> dict[Site, tuple[str, bytes]]:
        """Return this rank's part and digest by stage and the model's name, from digests ``begun``."""
        every = [(k, self.stages.rename(k, name), one) for k, own in begun.items() for name, one in own.items()]
        return {(stage, full): (str(self.stages.shards.get(full, "")), digest) for stage, full, digest in every}

    @staticmethod
    def flat(gradients: Mapping[str, Gradient]) -> dict[str, Shard]:
        """Return the places of flat shards among ``gradients``."""
        found = {name: one for name, one in gradients.items() if isinstance(one, FlatShard)}
        return {name: flat_shard(one.start if one.part is not None else 0, one.part) for name, one in found.items()}

    def lying(self, gradients: Mapping[str, Gradient], flat: Sequence[Mapping[str, Shard]]) -> dict[str, Tensor | None]:
        """Return this rank's ``gradients`` with all elements, and remember their places.

        ``flat``: flat parts on all ranks with its stages; this rank may lack one.
        """
        self.gradients.update(self.flat(gradients))
        found = {name: one.part if isinstance(one, FlatShard) else one for name, one in gradients.items()}
        if in_flat_parts(shard for one in flat for shard in one.values()):
            found |= dict.fromkeys(name for name in self.stages.places if name not in found)
            self.gradients.update({name: flat_shard(0, None) for name, one in found.items() if one is None})
        return {
            name: None if one is None else dense(local_tensor(add_partial(one, self.parameters.get(name))))
            for name, one in found.items()
        }

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a ``whole`` gradient."""
        shard = self._shard(name)
        return whole if shard is None else shard.of(whole)

    def in_whole(self, name: str, part: Tensor | None, whole: Tensor | None) -> Tensor | None:
        """Return ``whole`` with this rank's ``part`` in place; other ranks compare theirs."""
        shard = self._shard(name)
        if shard is None or part is None or whole is None or part.shape != shard.lengths:
            return part
        found = whole.clone()
        (found.view(-1) if shard.flat else found)[shard.index] = part.to(found.dtype)
        return found

    def in_place(self, name: str, part: Tensor | None) -> Tensor | None:
        """Return ``part`` in its place in the whole gradient, with zeros around."""
        return None if part is None else self.in_whole(name, part, part.new_zeros(self.stages.shapes[name]))

    def own_part(self, name: str, whole: Tensor | None) -> Tensor | None:
        """Return a ``whole`` gradient with zeros outside this rank's part."""
        return whole if whole is None or not self.lies(name) else self.in_place(name, self.part(name, whole))

    def lies(self, name: str) -> str:
        """Describe this rank's part of a gradient; empty if whole."""
        return str(self._shard(name) or "")

    def is_empty(self, name: str) -> bool:
        """True if this rank has no part of a gradient."""
        shard = self._shard(name)
        return shard is not None and not shard.count

    @property
    def parameters(self) -> dict[str, Tensor]:
        """This rank's parameters in the optimizer's form."""
        return self._rename(lambda module: dict(_name_parameters(module)))

    def _shard(self, name: str) -> Shard | None:
        return self.gradients.get(name, self.stages.shards.get(name))

    def _rename(self, found_in: Callable[[nn.Module], Mapping[str, _Found]]) -> dict[str, _Found]:
        """Rename results of ``found_in`` on each stage to the model's names."""
        every = ((k, pair) for k, module in self.stages.modules.items() for pair in found_in(module).items())
        return {self.stages.rename(stage, name): one for stage, (name, one) in every}


def _name_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)
