"""Sketches: a tensor in a few numbers, enough to recognise it again."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from pipeproof.core.observe.digest import SHARES, add_digests, content_of, digest, shares_of, wide_rows
from pipeproof.core.observe.elements import any_nonzero, bits, has_fp64, is_rounded, numbers, plain
from pipeproof.core.observe.likeness import NARROWER, ROUNDED_TO
from pipeproof.core.observe.shards import Shard

UNSOUGHT = "the cause was not sought: complex parameters are not supported; keep real and imaginary parts apart"
_ADDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_DIRECTIONS = 4
FEW = 16  # numbers that chance may match
_ROW = 65_521  # signs per direction


@dataclass(frozen=True)
class Sketch:
    """A tensor's form, digest, norm, and projections onto a few fixed random directions.

    A difference's projections have its norm as expected size, so they estimate distances. The digest ignores zero
    signs. narrow: a narrower type that represents all elements; empty if none does. said: digests in each such type.
    bits: an order-independent sum over elements as integers. computed: a narrower computing type; None if unknown.
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
        """Scale by ``factor``, without digest and bits."""
        projections = tuple(factor * one for one in self.projections)
        return replace(
            self, digest=b"", norm=abs(factor) * self.norm, projections=projections, bits=0, said=frozenset()
        )

    def plus(self, other: "Sketch") -> "Sketch":
        """Approximate the sum's sketch: without a digest, with the norm from projections."""
        projections = tuple(a + b for a, b in zip(self.projections, other.projections, strict=True))
        norm = math.sqrt(sum(one**2 for one in projections) / len(projections))
        narrow = self.narrow or other.narrow
        return replace(self, digest=b"", norm=norm, projections=projections, narrow=narrow, bits=0, said=frozenset())

    def minus(self, other: "Sketch") -> "Sketch":
        """Approximate the difference's sketch, like ``plus``."""
        return self.plus(other.times(-1.0))

    def is_same(self, other: "Sketch") -> bool:
        """True if both are known to be equal bit for bit."""
        return bool(self.digest) and self.digest == other.digest

    def says(self, other: "Sketch") -> bool:
        """True if both are equal bit for bit in some common type."""
        own, others = ({one.digest, *one.said} - {b""} for one in (self, other))
        return bool(own & others)

    def widen(self, dtype: torch.dtype) -> "Sketch":
        """Convert to a wider ``dtype``; otherwise unchanged."""
        name = next((name for name, narrow in ROUNDED_TO.items() if narrow == self.dtype != dtype), "")
        wide = name and dtype.is_floating_point and torch.finfo(dtype).eps < torch.finfo(self.dtype).eps
        return replace(self, dtype=dtype, narrow=self.narrow or name) if wide else self

    def distance(self, other: "Sketch") -> float:
        """Estimate the relative Frobenius error; infinite if incomparable."""
        if self.is_same(other):
            return 0.0
        if self.shape != other.shape or self.dtype != other.dtype or not other.norm:
            return math.inf
        distance = math.dist(self.projections, other.projections) / math.sqrt(len(self.projections)) / other.norm
        return distance if distance == distance else math.inf

    def gap(self, other: "Sketch") -> float:
        """Estimate the difference's norm; infinite for non-finite values."""
        norm = self.minus(other).norm
        return norm if norm == norm else math.inf

    def usual_distance(self, other: "Sketch") -> float:
        """Estimate the typical distance for sketches from ``brief``: a few far elements do not count."""
        distance = self.distance(other)
        if not 0.0 < distance < math.inf:
            return distance
        distances = [(a - b) ** 2 for a, b in zip(self.projections, other.projections, strict=True)]
        filled = distances[: max(1, min(SHARES, math.prod(self.shape)))]
        return min(distance, math.sqrt(median(filled)) / other.norm)

    def cosine(self, other: "Sketch") -> float | None:
        """Estimate the cosine. None if either is zero."""
        own, its = (math.sqrt(sum(one**2 for one in each.projections)) for each in (self, other))
        product = sum(a * b for a, b in zip(self.projections, other.projections, strict=True))
        return product / own / its if own and its else None

    def factor(self, other: "Sketch") -> float | None:
        """Return the factor over ``other``. None if projections show no multiple."""
        if self.shape != other.shape or not other.norm or not 0.0 < self.norm < math.inf:
            return None
        pairs = list(zip(self.projections, other.projections, strict=True))
        found = sum(a * b for a, b in pairs) / (sum(b * b for _, b in pairs) or math.inf)
        left, allowed = max(abs(a - found * b) for a, b in pairs), max(self.limit, other.limit) * self.norm
        alike = left <= allowed and abs(abs(found) * other.norm - self.norm) <= allowed
        return found if found and alike else None

    def is_reordered(self, other: "Sketch") -> bool:
        """True if both have equal elements, in another order or shape."""
        same = (self.dtype, self.bits, math.prod(self.shape)) == (other.dtype, other.bits, math.prod(other.shape))
        alike = abs(self.norm - other.norm) <= self.limit * self.norm
        return same and alike and 0.0 < self.norm and self.digest != other.digest and math.prod(self.shape) >= FEW

    @functools.cached_property
    def limit(self) -> float:
        """Distance within which tensors count as alike: half their digits."""
        types = [one for one in (self.dtype, self.computed) if one is not None]
        return math.sqrt(max(torch.finfo(one).eps for one in types)) if is_rounded(self.dtype) else 0.0

    def is_like(self, other: "Sketch") -> bool:
        """True if both agree up to rounding."""
        return self.distance(other) <= other.limit


def sketch(tensor: Tensor, *, known: Sketch | None = None) -> Sketch:
    """Sketch ``tensor`` on its device. Returns ``known`` if equal."""
    content = digest_of_values(tensor)
    if known is not None and known.digest == content:
        return known
    flat = numbers(tensor if has_fp64(tensor.device) else tensor.cpu())
    flat = flat.to(torch.float32 if flat.dtype in (torch.float32, *NARROWER.values()) else torch.float64)
    size, *projections = _sums(flat).tolist()
    narrow = list(_narrow(flat, tensor.dtype)) if is_rounded(tensor.dtype) and size == size else []
    own = tensor if narrow and tensor.dtype in (torch.float32, torch.float64) else None
    said = frozenset() if own is None else frozenset(digest_of_values(own.to(ROUNDED_TO[name])) for name in narrow)
    form = tuple(tensor.shape), tensor.dtype, content
    return Sketch(*form, size, tuple(projections), next(iter(narrow), ""), _bits(tensor), said)


def brief(tensor: Tensor, *, at: Shard | None = None, known: Sketch | None = None) -> Sketch:
    """Sketch ``tensor`` additively: part sketches sum to the whole's, without type or order recognition.

    at: the part's position in its whole. known: as in ``sketch``. The digest covers all bits. An odd element affects
    one projection alone.
    """
    shape = tuple(tensor.shape) if at is None else at.shape
    assert shape is not None, "a DTensor knows the whole's shape"
    bounds = tuple((0, length) for length in shape) if at is None else at.bounds
    content = content_of(tensor, shape, bounds)
    if known is not None and known.digest == content:
        return known
    square, shares = shares_of(tensor, shape, bounds)
    return Sketch(tuple(tensor.shape), tensor.dtype, content, math.sqrt(square), shares)


def add_sketches(parts: Sequence[Sketch], shape: tuple[int, ...]) -> Sketch:
    """Combine part sketches from ``brief`` into a whole with ``shape``."""
    if len(parts) == 1:
        return replace(parts[0], shape=shape)
    norm = math.hypot(*(one.norm for one in parts))
    projections = tuple(map(sum, zip(*(one.projections for one in parts), strict=True)))
    return replace(
        parts[0], shape=shape, digest=add_digests([one.digest for one in parts]), norm=norm, projections=projections
    )


def digest_of_values(tensor: Tensor) -> bytes:
    """Digest values, ignoring zero signs: sums lose them, and equality does not need them."""
    found = plain(tensor)
    return digest(found + 0.0 if found.dtype in _ADDED else found)


def _bits(tensor: Tensor) -> int:
    """Sum elements as wrapping integers, sensitive to signs.

    Each upper half is mixed into the lower half first: otherwise two signs would cancel.
    """
    words = bits(tensor)
    if words.element_size() < 4:
        words = (words.view(torch.int8) if words.element_size() == 1 else words).int()
    mixed = words >> (4 * words.element_size() - 1)
    return int(mixed.bitwise_xor_(words).sum(dtype=words.dtype))


def _narrow(flat: Tensor, own: torch.dtype) -> Iterator[str]:
    """Yield narrower types that represent ``flat`` exactly; a few elements soon exclude most."""
    few = flat[:FEW].cpu()
    for name, dtype in ROUNDED_TO.items():
        held = (torch.equal(part.to(dtype).to(part.dtype), part) for part in (few, flat))
        if dtype != flat.dtype and (dtype == own or all(held)) and any_nonzero(flat):
            yield name


def _sums(flat: Tensor) -> Tensor:
    """Return the norm and signed sums per direction (5,).

    The signs repeat, turned from row to row. Their number is prime, so that row-wise structure never meets the same
    signs repeatedly. All sums use fp64: no square underflows, and product settings and autocast have no effect.
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
    """Return signs (4, 65521), equal in all processes; one byte each, as device memory may be scarce."""
    generator = torch.Generator().manual_seed(_DIRECTIONS * _ROW)
    drawn = torch.randint(2, (_DIRECTIONS, _ROW), generator=generator, device="cpu")
    return (1 - 2 * drawn).to(torch.int8).to(device)


def _turns(rows: int) -> Tensor:
    """Return turned signs per row and direction (N, 4)."""
    generator = torch.Generator().manual_seed(_ROW)
    return 1 - 2 * torch.randint(2, (rows, _DIRECTIONS), generator=generator, device="cpu")
