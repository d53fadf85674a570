"""Shards: the part of a parameter on a rank, from DTensors or declarations."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

Index = slice | tuple[slice, ...]  # as in ``whole[index]``, for leading dimensions; others are whole
Indices = Index | list[Index]  # or several pieces, adjacent in the part's first dimension
Bounds = tuple[tuple[int, int], ...]  # start and stop per dimension


_OfProtocols: Any = type(Protocol)


class _ByType(_OfProtocols):  # type: ignore[misc]  # protocols' metaclass is private
    """Checks the type first: Python's own protocol check takes many times as long, and runs per tensor."""

    def __instancecheck__(cls, instance: object) -> bool:
        return hasattr(type(instance), "to_local") and all(
            hasattr(instance, one) for one in ("placements", "device_mesh")
        )


@runtime_checkable
class InShards(Protocol, metaclass=_ByType):
    """A DTensor, without its import, which takes seconds."""

    @property
    def placements(self) -> Sequence[Any]: ...

    @property
    def device_mesh(self) -> Any: ...

    def to_local(self) -> Tensor: ...


class ShardError(ValueError):
    """Raised for parts without a whole."""


@dataclass(frozen=True)
class Shard:
    """A part's position. ``shape``: the whole's, if known; ``peers``: ranks with other parts, if known.

    flat: the part, bounds and shape refer to the flattened whole. addend: index and count, for a sum spread over
    several tensors, as in a Partial DTensor. beside: further pieces, in order along the part's first dimension.
    """

    bounds: Bounds
    shape: tuple[int, ...] | None = None
    peers: tuple[int, ...] = field(default=(), compare=False)  # ignored, so that replicas' parts are equal
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
        """Split into single pieces."""
        return [replace(self, bounds=one, beside=()) for one in self._each]

    @property
    def index(self) -> tuple[slice, ...]:
        """The first piece's index."""
        return tuple(slice(*bound) for bound in self.bounds)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The part's shape."""
        first, *others = ([stop - start for start, stop in one] for one in self._each)
        return (first[0] + sum(one[0] for one in others), *first[1:]) if first else ()

    def of(self, whole: Tensor) -> Tensor:
        """Select this part from ``whole``."""
        if self.beside:
            return torch.cat([one.of(whole) for one in self.pieces])
        return whole.flatten()[self.index] if self.flat else whole[self.index]

    def in_all(self, shape: Sequence[int]) -> "Shard":
        """Extend bounds to all dimensions: an index names leading ones, and an absent part reveals no others."""
        whole = [(0, length) for length in shape]
        first, *others = ((*one, *whole[len(one) :]) for one in self._each)
        return self if self.flat else replace(self, bounds=first, beside=tuple(others))

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)

    @property
    def is_all(self) -> bool:
        """True if the part covers the whole."""
        return self.shape is not None and self.addend[1] == 1 and self.count == math.prod(self.shape)

    def overlaps(self, other: "Shard") -> bool:
        """True if first pieces overlap."""
        return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(self.bounds, other.bounds, strict=True))


def is_plain(tensor: Tensor) -> bool:
    """True for a plain strided tensor, readable without other ranks."""
    return type(tensor) is Tensor and tensor.layout == torch.strided


def whole_here(tensor: Tensor) -> Tensor | None:
    """Return ``tensor``, or a fully replicated DTensor's value. None for a part."""
    if not isinstance(tensor, InShards):
        return tensor
    return tensor.to_local() if all(placement.is_replicate() for placement in tensor.placements) else None


def local_tensor(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a DTensor's local part, without communication."""
    return tensor.to_local() if isinstance(tensor, InShards) else tensor


def add_partial(gradient: Any, parameter: Any) -> Tensor:
    """Redistribute a DTensor ``gradient`` to its ``parameter``'s placements; others return unchanged.

    All mesh ranks must call it, as the optimizer does.
    """
    if isinstance(gradient, InShards) and gradient.placements != getattr(parameter, "placements", gradient.placements):
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]  # of DTensor
    made: Tensor = gradient
    return made


def shard_of(tensor: Tensor) -> Shard | None:
    """Return the local shard of a DTensor. None for other tensors. Raises ``ShardError`` for unsupported placements."""
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
    """Return a DTensor's mesh axes with placements, in cutting order.

    torch's ``_StridedShard`` results from ``fully_shard`` after tensor parallelism: its axis precedes the others in the
    mesh, but cuts the ``split_factor`` parts of later axes. Raises ``ShardError`` for other placements, or if those
    axes are absent.
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
    """Return a placement's cut dimension. From torch 2.13 on, ``_StridedShard`` is no Shard subclass."""
    return None if placement.is_partial() else getattr(placement, "dim", None)


def find_shard(tensor: Tensor) -> Shard | None:
    """Return ``shard_of``, or None for unsupported placements."""
    try:
        return shard_of(tensor)
    except ShardError:
        return None


def shard_at(index: Indices, part: Tensor | None) -> Shard:
    """Build the shard for an index. Raises ``ShardError`` if it does not fit ``part``."""
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
    """Return start and stop; an open slice extends to the part's length."""
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
    """Build a shard from a flat part. Raises ``ShardError`` for other parts."""
    shape = (0,) if part is None else tuple(part.shape)
    if start < 0 or len(shape) != 1:
        what = f"begins at {start} and has shape {list(shape)}"
        raise ShardError(f"its flat part {what}: expected one dimension, from an element of the flattened whole on")
    return Shard(((start, start + shape[0]),), flat=True)


def in_flat_parts(shards: Iterable[Shard]) -> bool:
    """True if gradients lie in flat parts.

    Then a rank without elements lacks a part, rather than a gradient.
    """
    return any(shard.flat for shard in shards)


def with_sizes(shards: Mapping[int, Shard], shapes: Mapping[int, tuple[int, ...]]) -> dict[int, Shard]:
    """Add whole shapes from ``shapes`` to shards, by parameter number."""

    def with_size(shard: Shard, shape: tuple[int, ...]) -> Shard:
        if shard.flat:
            return replace(shard, shape=(math.prod(shape),))
        return replace(shard.in_all(shape), shape=shape)

    return {k: with_size(one, shapes[k]) if one.shape is None and k in shapes else one for k, one in shards.items()}


def join_shards(parts: Sequence[tuple[Shard, Tensor | None]]) -> Tensor | None:
    """Join parts into the whole: first of equal parts, NaN for gaps. None if no rank has a part.

    If all parts are zero, gaps are zero too.
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


def find_untiled(shards: Sequence[Shard]) -> str:
    """Explain why ``shards`` make no whole; empty if each element lies in one shard."""
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
    """Yield all pairs, or, for shards cut along one dimension, adjacent pairs."""
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
