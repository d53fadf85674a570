"""A tensor in a few numbers, enough to recognise it again: its content tells its origin."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from pipeproof.core.observe.additive import SHARES, added_digests, content_of, shares_of
from pipeproof.core.observe.digest import digest, wide_rows
from pipeproof.core.observe.elements import any_nonzero, bits, has_fp64, is_rounded, numbers, plain
from pipeproof.core.observe.likeness import NARROWER, ROUNDED_TO
from pipeproof.core.observe.shards import Shard

UNSOUGHT = "the cause was not sought: that is not done in complex parameters; hold real and imaginary parts apart"
_ADDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_DIRECTIONS = 4
FEW = 16  # numbers that are soon like others by chance
_ROW = 65_521  # signs in a direction


@dataclass(frozen=True)
class Sketch:
    """A tensor's form, its digest, its norm and its projections onto a few fixed random directions.

    The projections of a difference have its norm as their expected size, so they tell how far apart two tensors are.
    The digest is of the values: a zero has no sign there. ``narrow`` is the type, narrower than its own, that every
    element can be said in; empty if there is none. ``said`` has the digest of the tensor in each such type. ``bits`` is
    a sum over all elements read as integers, which no order changes. ``computed`` is the type, narrower than its own,
    that it was computed in; None where nobody knows of one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: bytes
    norm: float
    projections: tuple[float, ...]
    narrow: str = ""
    bits: int = 0
    said: frozenset[bytes] = frozenset()
    computed: torch.dtype | None = None

    def times(self, factor: float) -> "Sketch":
        """That of the tensor multiplied by ``factor``, but for its digest and bits."""
        projections = tuple(factor * one for one in self.projections)
        return replace(
            self, digest=b"", norm=abs(factor) * self.norm, projections=projections, bits=0, said=frozenset()
        )

    def plus(self, other: "Sketch") -> "Sketch":
        """About that of the sum of both tensors: nobody knows its digest, and its norm is what its projections tell."""
        projections = tuple(a + b for a, b in zip(self.projections, other.projections, strict=True))
        norm = math.sqrt(sum(one**2 for one in projections) / len(projections))
        narrow = self.narrow or other.narrow
        return replace(self, digest=b"", norm=norm, projections=projections, narrow=narrow, bits=0, said=frozenset())

    def minus(self, other: "Sketch") -> "Sketch":
        """About that of the difference, as ``plus`` has it."""
        return self.plus(other.times(-1.0))

    def is_same(self, other: "Sketch") -> bool:
        """Whether both are known to be one tensor to the last bit."""
        return bool(self.digest) and self.digest == other.digest

    def says(self, other: "Sketch") -> bool:
        """Whether this is ``other`` to the last bit, in a narrower or a wider type or in its own."""
        own, others = ({one.digest, *one.said} - {b""} for one in (self, other))
        return bool(own & others)

    def widened(self, dtype: torch.dtype) -> "Sketch":
        """That of the tensor as it is in ``dtype``, if that is a wider type; itself otherwise."""
        name = next((name for name, narrow in ROUNDED_TO.items() if narrow == self.dtype != dtype), "")
        wide = name and dtype.is_floating_point and torch.finfo(dtype).eps < torch.finfo(self.dtype).eps
        return replace(self, dtype=dtype, narrow=self.narrow or name) if wide else self

    def distance(self, other: "Sketch") -> float:
        """About the relative Frobenius error of this against ``other``; infinite where they cannot be compared."""
        if self.is_same(other):
            return 0.0
        if self.shape != other.shape or self.dtype != other.dtype or not other.norm:
            return math.inf
        distance = math.dist(self.projections, other.projections) / math.sqrt(len(self.projections)) / other.norm
        return distance if distance == distance else math.inf

    def gap(self, other: "Sketch") -> float:
        """About the norm of the difference; infinite where something is not finite."""
        norm = self.minus(other).norm
        return norm if norm == norm else math.inf

    def usual_distance(self, other: "Sketch") -> float:
        """As ``distance``, of two that ``brief`` made, as most elements are apart: a few far ones do not count."""
        distance = self.distance(other)
        if not 0.0 < distance < math.inf:
            return distance
        filled = self._apart(other)[: max(1, min(SHARES, math.prod(self.shape)))]
        return min(distance, math.sqrt(median(filled)) / other.norm)

    def cosine(self, other: "Sketch") -> float | None:
        """About that of the angle between both; None where one is zero."""
        own, its = (math.sqrt(sum(one**2 for one in each.projections)) for each in (self, other))
        product = sum(a * b for a, b in zip(self.projections, other.projections, strict=True))
        return product / own / its if own and its else None

    def _apart(self, other: "Sketch") -> list[float]:
        return [(a - b) ** 2 for a, b in zip(self.projections, other.projections, strict=True)]

    def factor(self, other: "Sketch") -> float | None:
        """How many times ``other`` this is; None if it is no multiple, as far as projections tell."""
        if self.shape != other.shape or not other.norm or not 0.0 < self.norm < math.inf:
            return None
        pairs = list(zip(self.projections, other.projections, strict=True))
        found = sum(a * b for a, b in pairs) / (sum(b * b for _, b in pairs) or math.inf)
        left, allowed = max(abs(a - found * b) for a, b in pairs), max(self.limit, other.limit) * self.norm
        alike = left <= allowed and abs(abs(found) * other.norm - self.norm) <= allowed
        return found if found and alike else None

    def is_reordered(self, other: "Sketch") -> bool:
        """Whether this has the very elements of ``other``, in another order or another shape."""
        same = (self.dtype, self.bits, math.prod(self.shape)) == (other.dtype, other.bits, math.prod(other.shape))
        alike = abs(self.norm - other.norm) <= self.limit * self.norm
        return same and alike and 0.0 < self.norm and self.digest != other.digest and math.prod(self.shape) >= FEW

    @functools.cached_property
    def limit(self) -> float:
        """How far another tensor may be and still be taken for this one: half of the digits that it has."""
        types = [one for one in (self.dtype, self.computed) if one is not None]
        return math.sqrt(max(torch.finfo(one).eps for one in types)) if is_rounded(self.dtype) else 0.0

    def is_like(self, other: "Sketch") -> bool:
        """Whether this is ``other`` up to rounding."""
        return self.distance(other) <= other.limit


def sketch(tensor: Tensor, *, known: Sketch | None = None) -> Sketch:
    """The sketch of ``tensor``: ``known`` itself, where it is one of an equal tensor. It is made where that lies."""
    content = digest_of_values(tensor)
    if known is not None and known.digest == content:
        return known
    flat = _countable(tensor)
    size, *projections = _sums(flat).tolist()
    narrow = list(_narrow(flat, tensor.dtype)) if is_rounded(tensor.dtype) and size == size else []
    own = tensor if narrow and tensor.dtype in (torch.float32, torch.float64) else None
    said = frozenset() if own is None else frozenset(digest_of_values(own.to(ROUNDED_TO[name])) for name in narrow)
    form = tuple(tensor.shape), tensor.dtype, content
    return Sketch(*form, size, tuple(projections), next(iter(narrow), ""), _bits(tensor), said)


def brief(tensor: Tensor, *, at: Shard | None = None, known: Sketch | None = None) -> Sketch:
    """A sketch of which those of parts add up to the whole's, without what recognises it in other types or orders.

    at: where ``tensor`` lies in the whole, of which it is a part. ``known`` as for ``sketch``. The digest is of all
    bits. What is odd in one element is odd in one projection alone.
    """
    shape = tuple(tensor.shape) if at is None else at.shape
    assert shape is not None, "a DTensor knows the whole's shape"
    bounds = tuple((0, length) for length in shape) if at is None else at.bounds
    content = content_of(tensor, shape, bounds)
    if known is not None and known.digest == content:
        return known
    square, shares = shares_of(tensor, shape, bounds)
    return Sketch(tuple(tensor.shape), tensor.dtype, content, math.sqrt(square), shares)


def added(parts: Sequence[Sketch], shape: tuple[int, ...]) -> Sketch:
    """The sketch of a whole of this ``shape``, by those of its parts that ``brief`` made."""
    if len(parts) == 1:
        return replace(parts[0], shape=shape)
    norm = math.hypot(*(one.norm for one in parts))
    projections = tuple(map(sum, zip(*(one.projections for one in parts), strict=True)))
    return replace(
        parts[0], shape=shape, digest=added_digests([one.digest for one in parts]), norm=norm, projections=projections
    )


def _countable(tensor: Tensor) -> Tensor:
    """The elements as numbers of a type that sums can be made of; on the host where their device has no fp64."""
    flat = numbers(tensor if has_fp64(tensor.device) else tensor.cpu())
    wide = torch.float32 if flat.dtype in (torch.float32, *NARROWER.values()) else torch.float64
    return flat.to(wide)


def digest_of_values(tensor: Tensor) -> bytes:
    """That of ``tensor``, but that no zero has a sign: whoever adds up messages loses that, and it is equal without."""
    found = plain(tensor)
    return digest(found + 0.0 if found.dtype in _ADDED else found)


def _bits(tensor: Tensor) -> int:
    """A sum over the elements as integers, which wraps around, and which tells their signs apart.

    The upper half of each is mixed into the lower one first: else two signs would add nothing together.
    """
    words = bits(tensor)
    if words.element_size() < 4:
        words = (words.view(torch.int8) if words.element_size() == 1 else words).int()
    mixed = words >> (4 * words.element_size() - 1)
    return int(mixed.bitwise_xor_(words).sum(dtype=words.dtype))


def _narrow(flat: Tensor, own: torch.dtype) -> Iterator[str]:
    """The narrower types that hold ``flat`` as it is, with its ``own``; a few elements soon say that there is none."""
    few = flat[:FEW].cpu()
    for name, dtype in ROUNDED_TO.items():
        held = (torch.equal(part.to(dtype).to(part.dtype), part) for part in (few, flat))
        if dtype != flat.dtype and (dtype == own or all(held)) and any_nonzero(flat):
            yield name


def _sums(flat: Tensor) -> Tensor:
    """The norm, and the sums of the elements with signs, in each direction (5,).

    So many signs are kept, and turned from row to row. Their number is a prime, so that nothing that lies in rows of
    its own falls on the same signs again and again. All is made in fp64: squares vanish in no narrow type, and no
    setting of products rounds, nor autocast.
    """
    even, rest = flat.numel() // _ROW * _ROW, flat.numel() % _ROW
    signs, last = _signs(flat.device), flat[even:].double()
    found, square = signs[:, :rest].double() @ last, last @ last
    if even:
        signs, sums = signs.double(), list[Tensor]()
        for part in wide_rows(flat[:even], _ROW):
            sums.append(part @ signs.T)
            square = square + part.square_().sum()
        rows = torch.cat(sums)
        found = found + (rows * _turns(len(rows)).to(flat.device)).sum(0)
    return torch.cat([square.sqrt()[None], found])


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """Signs (4, 65521), the same in every process; a byte each, for a model that is looked at may have little more."""
    generator = torch.Generator().manual_seed(_DIRECTIONS * _ROW)
    drawn = torch.randint(2, (_DIRECTIONS, _ROW), generator=generator, device="cpu")
    return (1 - 2 * drawn).to(torch.int8).to(device)


def _turns(rows: int) -> Tensor:
    """For each row and direction, whether its signs are turned (N, 4)."""
    generator = torch.Generator().manual_seed(_ROW)
    return 1 - 2 * torch.randint(2, (rows, _DIRECTIONS), generator=generator, device="cpu")
