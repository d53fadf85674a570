"""Which part of a parameter a rank holds, where it does not hold all of it: told by a DTensor, or by whoever knows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

Index = slice | tuple[slice, ...]  # as in ``whole[index]``: of the first dimensions; the others are whole
Bounds = tuple[tuple[int, int], ...]  # from where to where, in every dimension


@runtime_checkable
class InShards(Protocol):
    """A DTensor, which takes seconds to import where nobody uses one."""

    @property
    def placements(self) -> Sequence[Any]: ...

    @property
    def device_mesh(self) -> Any: ...

    def to_local(self) -> Tensor: ...


class ShardError(ValueError):
    """A tensor in parts that cannot be put together."""


@dataclass(frozen=True)
class Shard:
    """Where a part lies. ``shape`` is the whole's, if that is known, ``peers`` the ranks with the others, if known.

    ``flat``: the part is of the flattened whole, and so are bounds and shape. ``addend``: which of how many tensors it
    is whose sum lies there, as in a DTensor that is Partial.
    """

    bounds: Bounds
    shape: tuple[int, ...] | None = None
    peers: tuple[int, ...] = field(default=(), compare=False)  # those of two replicas are one part
    flat: bool = False
    addend: tuple[int, int] = (0, 1)

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{stop}' for start, stop in self.bounds)}]"

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(*bound) for bound in self.bounds)

    def of(self, whole: Tensor) -> Tensor:
        """What lies there in ``whole``."""
        return whole.flatten()[self.index] if self.flat else whole[self.index]

    @property
    def count(self) -> int:
        """How many elements."""
        count = 1
        for start, stop in self.bounds:
            count *= stop - start
        return count

    def overlaps(self, other: "Shard") -> bool:
        return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(self.bounds, other.bounds, strict=True))


def held_whole(tensor: Tensor) -> Tensor | None:
    """``tensor``, or all that a DTensor has, where this rank has it; None where it has a part."""
    if not isinstance(tensor, InShards):
        return tensor
    return tensor.to_local() if all(placement.is_replicate() for placement in tensor.placements) else None


def shard_of(tensor: Tensor) -> Shard | None:
    """Where this rank's part of a DTensor lies; None of any other tensor. Raises ``ShardError`` for what is no part."""
    if not isinstance(tensor, InShards):
        return None
    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    bounds = [(0, length) for length in shape]
    own, addends = 0, 1
    for number, placement in _as_cut(tensor):
        if placement.is_partial():
            if placement.reduce_op != "sum":
                raise ShardError(f"it is {placement}: expected Partial(sum), or reduce it over its mesh first")
            own, addends = own * mesh.size(number) + mesh.get_coordinate()[number], addends * mesh.size(number)
            continue
        if _cut(placement) is not None:
            start, stop = bounds[placement.dim]
            part = -(-(stop - start) // mesh.size(number))
            first = min(start + part * mesh.get_coordinate()[number], stop)
            bounds[placement.dim] = first, min(first + part, stop)
    return Shard(tuple(bounds), shape, tuple(mesh.mesh.flatten().tolist()), addend=(own, addends))


def _as_cut(tensor: InShards) -> list[tuple[int, Any]]:
    """The axes of a DTensor's mesh and what is placed along them, in the order in which it was cut.

    torch's ``_StridedShard`` is what ``fully_shard`` makes of a parameter that tensor parallelism cut before it: its
    axis comes first in the mesh, and cuts the ``split_factor`` parts of later axes. Raises ``ShardError`` for any other
    placement, and where those axes are not there.
    """
    plain: list[tuple[int, Any]] = []
    strided: list[tuple[int, Any]] = []
    for number, placement in enumerate(tensor.placements):
        name = type(placement).__name__
        if name not in ("Shard", "Replicate", "_StridedShard") and not placement.is_partial():
            raise ShardError(f"its placement is {placement}: expected Shard or Replicate")
        (strided if name == "_StridedShard" else plain).append((number, placement))
    for number, placement in strided:
        others = [axis for axis, other in plain + strided if axis != number and _cut(other) == placement.dim]
        parts = math.prod(tensor.device_mesh.size(axis) for axis in others)
        if parts != placement.split_factor or min(others, default=number) < number:
            factor = placement.split_factor
            raise ShardError(f"its placement {placement} cuts {factor} parts, and later axes of its mesh make {parts}")
    return plain + strided


def _cut(placement: Any) -> int | None:
    """The dimension that a placement cuts. A ``_StridedShard`` is no shard to torch from 2.13 on."""
    return None if placement.is_partial() else getattr(placement, "dim", None)


def placed_as(tensor: Tensor) -> Shard | None:
    """As ``shard_of``; None of what is no part."""
    try:
        return shard_of(tensor)
    except ShardError:
        return None


def shard_at(index: Index, part: Tensor | None) -> Shard:
    """The part of a parameter that has this index. Raises ``ShardError`` where the two do not fit."""
    slices = index if isinstance(index, tuple) else (index,)
    for one in slices:
        if not isinstance(one, slice) or one.start is None or one.stop is None or one.step not in (None, 1):
            raise ShardError(f"its index has {one}: expected slices that say from where to where, e.g. slice(0, 4)")
    bounds = tuple((int(one.start), int(one.stop)) for one in slices)
    if part is not None:
        lengths = tuple(part.shape)
        if tuple(stop - start for start, stop in bounds) != lengths[: len(bounds)]:
            raise ShardError(f"its index is {index}, but its shape {list(lengths)}: expected one to fit the other")
        bounds += tuple((0, length) for length in lengths[len(bounds) :])
    return Shard(bounds)


def flat_shard(start: int, part: Tensor | None) -> Shard:
    """So many elements of the flattened whole. Raises ``ShardError`` for what is no such part."""
    shape = (0,) if part is None else tuple(part.shape)
    if start < 0 or len(shape) != 1:
        what = f"begins at {start} and has shape {list(shape)}"
        raise ShardError(f"its flat part {what}: expected one dimension, from an element of the flattened whole on")
    return Shard(((start, start + shape[0]),), flat=True)


def sized(shards: Mapping[int, Shard], sizes: Mapping[int, tuple[int, ...]]) -> dict[int, Shard]:
    """``shards`` by the parameter's number; flat ones know the size of the whole, where that is in ``sizes``."""
    return {k: replace(one, shape=sizes.get(k)) if one.flat else one for k, one in shards.items()}


def gathered(parts: Sequence[tuple[Shard, Tensor | None]]) -> Tensor | None:
    """The whole, of equal parts the first, not a number where no part lies; None where no rank has anything."""
    given = [(shard, part) for shard, part in reversed(parts) if part is not None]
    if not given:
        return None
    whole = given[0][1].new_full(_shape([shard for shard, _ in given]), float("nan"))
    for shard, part in sorted(dict(given).items(), key=lambda one: one[0].addend):
        whole[shard.index] = part if shard.addend[0] == 0 else whole[shard.index] + part
    return whole


def untiled(shards: Sequence[Shard]) -> str:
    """What is wrong with ``shards`` as the parts of one whole; empty if each element is in one of them."""
    for one in shards:
        missing = set(range(one.addend[1])) - {two.addend[0] for two in shards if two.bounds == one.bounds}
        if missing:
            return f"part {one} is a sum of {one.addend[1]}: number {min(missing)} of them is nowhere"
    distinct = list(dict.fromkeys(replace(one, addend=(0, 1)) for one in shards))
    if len({(len(shard.bounds), shard.flat) for shard in distinct}) > 1:
        return "parts of different dimensions"
    for one, two in combinations(distinct, 2):
        if one.overlaps(two):
            return f"parts {one} and {two} overlap"
    shape = _shape(distinct)
    whole = Shard(tuple((0, length) for length in shape))
    for one in distinct:
        if any(stop > length for (_, stop), length in zip(one.bounds, shape, strict=True)):
            return f"part {one} of {list(shape)}: it ends outside"
    held = sum(shard.count for shard in distinct)
    return f"parts {', '.join(map(str, distinct))} of {list(shape)}: not all of it" if held < whole.count else ""


def _shape(shards: Sequence[Shard]) -> tuple[int, ...]:
    known = next((shard.shape for shard in shards if shard.shape is not None), None)
    if known is not None:
        return known
    return tuple(max(stop for _, stop in column) for column in zip(*(shard.bounds for shard in shards), strict=True))
