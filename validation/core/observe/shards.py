"""Which part of a parameter a rank holds, where it does not hold all of it: told by a DTensor, or by whoever knows."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

Index = slice | tuple[slice, ...]  # as in ``whole[index]``: of the first dimensions; the others are whole
Indices = Index | list[Index]  # or of several pieces, which lie behind each other in the first dimension of the part
Bounds = tuple[tuple[int, int], ...]  # from where to where, in every dimension


_OfProtocols: Any = type(Protocol)


class _ByType(_OfProtocols):  # type: ignore[misc]  # which has no name
    """Asks the type first: Python's own look at every member takes many times as long, and each tensor is asked."""

    def __instancecheck__(cls, instance: object) -> bool:
        return hasattr(type(instance), "to_local") and all(
            hasattr(instance, one) for one in ("placements", "device_mesh")
        )


@runtime_checkable
class InShards(Protocol, metaclass=_ByType):
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
    is whose sum lies there, as in a DTensor that is Partial. ``beside``: where its other pieces lie, in the order in
    which they follow each other in its first dimension.
    """

    bounds: Bounds
    shape: tuple[int, ...] | None = None
    peers: tuple[int, ...] = field(default=(), compare=False)  # those of two replicas are one part
    flat: bool = False
    addend: tuple[int, int] = (0, 1)
    beside: tuple[Bounds, ...] = ()

    def __str__(self) -> str:
        return " and ".join(f"[{', '.join(f'{start}:{stop}' for start, stop in one)}]" for one in self._each)

    @property
    def _each(self) -> tuple[Bounds, ...]:
        return (self.bounds, *self.beside)

    @property
    def pieces(self) -> "list[Shard]":
        """Each by itself."""
        return [replace(self, bounds=one, beside=()) for one in self._each]

    @property
    def index(self) -> tuple[slice, ...]:
        """Of its first piece."""
        return tuple(slice(*bound) for bound in self.bounds)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The shape of what lies there."""
        first, *others = ([stop - start for start, stop in one] for one in self._each)
        return (first[0] + sum(one[0] for one in others), *first[1:]) if first else ()

    def of(self, whole: Tensor) -> Tensor:
        """What lies there in ``whole``."""
        if self.beside:
            return torch.cat([one.of(whole) for one in self.pieces])
        return whole.flatten()[self.index] if self.flat else whole[self.index]

    def in_all(self, shape: Sequence[int]) -> "Shard":
        """The same in all dimensions: an index names the first ones, and where no part is there no others are known."""
        whole = [(0, length) for length in shape]
        first, *others = ((*one, *whole[len(one) :]) for one in self._each)
        return self if self.flat else replace(self, bounds=first, beside=tuple(others))

    @property
    def count(self) -> int:
        """How many elements."""
        return math.prod(self.lengths)

    @property
    def is_all(self) -> bool:
        """Whether it is all that there is."""
        return self.shape is not None and self.addend[1] == 1 and self.count == math.prod(self.shape)

    def overlaps(self, other: "Shard") -> bool:
        """Whether their first pieces do."""
        return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(self.bounds, other.bounds, strict=True))


def is_plain(tensor: Tensor) -> bool:
    """Whether it can be looked at without other ranks, and added up: no shard, nothing sparse."""
    return type(tensor) is Tensor and tensor.layout == torch.strided


def held_whole(tensor: Tensor) -> Tensor | None:
    """``tensor``, or all that a DTensor has, where this rank has it; None where it has a part."""
    if not isinstance(tensor, InShards):
        return tensor
    return tensor.to_local() if all(placement.is_replicate() for placement in tensor.placements) else None


def held_here(tensor: Tensor) -> Tensor:
    """``tensor``, or what this rank has of a DTensor: no other rank is asked."""
    return tensor.to_local() if isinstance(tensor, InShards) else tensor


def added_up(gradient: Any, parameter: Any) -> Tensor:
    """``gradient``; of a DTensor that lies elsewhere than its ``parameter``, or is a sum not formed yet, what there is.

    That asks all ranks of its mesh, as the optimizer does.
    """
    if isinstance(gradient, InShards) and gradient.placements != getattr(parameter, "placements", gradient.placements):
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]  # of DTensor
    made: Tensor = gradient
    return made


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


def shard_at(index: Indices, part: Tensor | None) -> Shard:
    """The part of a parameter that has this index. Raises ``ShardError`` where the two do not fit."""
    pieces = [one if isinstance(one, tuple) else (one,) for one in (index if isinstance(index, list) else [index])]
    lengths = None if part is None else tuple(part.shape)
    if not pieces or len({len(one) for one in pieces}) > 1 or (lengths is not None and len(pieces[0]) > len(lengths)):
        raise _misfit(index, lengths)
    bounds = [
        tuple(_bound(one, lengths if len(pieces) == 1 else None, dim) for dim, one in enumerate(p)) for p in pieces
    ]
    whole = () if lengths is None else tuple((0, length) for length in lengths[len(pieces[0]) :])
    first, *others = ((*one, *whole) for one in bounds)
    found = Shard(first, beside=tuple(others))
    if lengths is not None and found.lengths != lengths:
        raise _misfit(index, lengths)
    if any(one.overlaps(two) for one, two in combinations(found.pieces, 2)):
        raise ShardError(f"its index is {index}, whose pieces overlap: expected each row once")
    return found


def _bound(one: slice, lengths: tuple[int, ...] | None, dim: int) -> tuple[int, int]:
    """From where to where; where only one of them is said, the part has all from there, or up to there."""
    said = [one.start, one.stop] if isinstance(one, slice) and one.step in (None, 1) else [-1]
    if said[-1] is None and lengths is not None:
        said[-1] = (said[0] or 0) + lengths[dim]
    start, stop = said[0] or 0, said[-1]
    if not isinstance(start, int) or not isinstance(stop, int) or not 0 <= start <= stop:
        raise ShardError(f"its index has {one}: expected slices that say from where to where, e.g. slice(0, 4)")
    return start, stop


def _misfit(index: Indices, lengths: tuple[int, ...] | None) -> ShardError:
    shape = "no part is there" if lengths is None else f"its shape {list(lengths)}"
    return ShardError(f"its index is {index}, but {shape}: expected one to fit the other")


def flat_shard(start: int, part: Tensor | None) -> Shard:
    """So many elements of the flattened whole. Raises ``ShardError`` for what is no such part."""
    shape = (0,) if part is None else tuple(part.shape)
    if start < 0 or len(shape) != 1:
        what = f"begins at {start} and has shape {list(shape)}"
        raise ShardError(f"its flat part {what}: expected one dimension, from an element of the flattened whole on")
    return Shard(((start, start + shape[0]),), flat=True)


def in_flat_parts(shards: Iterable[Shard]) -> bool:
    """Whether gradients of a stage, whose ranks have these ``shards``, lie in flat parts.

    Then a rank of it that has nothing of one of its gradients has no part of that, in place of no gradient.
    """
    return any(shard.flat for shard in shards)


def sized(shards: Mapping[int, Shard], shapes: Mapping[int, tuple[int, ...]]) -> dict[int, Shard]:
    """``shards`` by the parameter's number; those that do not know the whole's shape learn it from ``shapes``."""

    def known(shard: Shard, shape: tuple[int, ...]) -> Shard:
        if shard.flat:
            return replace(shard, shape=(math.prod(shape),))
        return replace(shard.in_all(shape), shape=shape)

    return {k: known(one, shapes[k]) if one.shape is None and k in shapes else one for k, one in shards.items()}


def gathered(parts: Sequence[tuple[Shard, Tensor | None]]) -> Tensor | None:
    """The whole, of equal parts the first, not a number where no part lies; None where no rank has anything.

    Beside nothing but zeros, what is not there is zero, too.
    """
    given = [(shard, part) for shard, part in reversed(parts) if part is not None]
    if not given:
        return None
    lacking = float("nan") if any(part.any() for _, part in given) else 0.0
    whole = given[0][1].new_full(_shape([shard for shard, _ in parts]), lacking)
    for shard, part in sorted(dict(given).items(), key=lambda one: one[0].addend):
        rows = torch.split(part, [one.lengths[0] for one in shard.pieces]) if shard.beside else [part]
        for piece, of_it in zip(shard.pieces, rows, strict=True):
            whole[piece.index] = of_it if shard.addend[0] == 0 else whole[piece.index] + of_it
    return whole


def untiled(shards: Sequence[Shard]) -> str:
    """What is wrong with ``shards`` as the parts of one whole; empty if each element is in one of them."""
    for one in (shard for shard in shards if shard.addend[1] > 1):
        missing = set(range(one.addend[1])) - {two.addend[0] for two in shards if two._each == one._each}
        if missing:
            return f"part {one} is a sum of {one.addend[1]}: number {min(missing)} of them is nowhere"
    distinct = list(dict.fromkeys(replace(piece, addend=(0, 1)) for one in shards for piece in one.pieces))
    if len({(len(shard.bounds), shard.flat) for shard in distinct}) > 1:
        return "parts of different dimensions"
    for one, two in _neighbours([shard for shard in distinct if shard.count]):
        if one.overlaps(two):
            return f"parts {one} and {two} overlap"
    shape = _shape(distinct)
    whole = Shard(tuple((0, length) for length in shape))
    for one in distinct:
        if any(stop > length for (_, stop), length in zip(one.bounds, shape, strict=True)):
            return f"part {one} of {list(shape)}: it ends outside"
    held = sum(shard.count for shard in distinct)
    return f"parts {', '.join(map(str, distinct))} of {list(shape)}: not all of it" if held < whole.count else ""


def _neighbours(shards: Sequence[Shard]) -> Iterable[tuple[Shard, Shard]]:
    """All pairs, or, of shards that are cut along one dimension alone, those in which one follows the other."""
    cut = [dim for dim, ends in enumerate(zip(*(one.bounds for one in shards), strict=True)) if len(set(ends)) > 1]
    return pairwise(sorted(shards, key=lambda one: one.bounds)) if len(cut) == 1 else combinations(shards, 2)


def _shape(shards: Sequence[Shard]) -> tuple[int, ...]:
    known = next((shard.shape for shard in shards if shard.shape is not None), None)
    if known is not None:
        return known
    return tuple(
        max(stop for _, stop in column)
        for column in zip(*(one for shard in shards for one in shard._each), strict=True)
    )
