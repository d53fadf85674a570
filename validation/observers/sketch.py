"""A tensor's elements, and the tensor in a few numbers, enough to recognise it again: its content tells its origin."""

import functools
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.observers.likeness import ROUNDED_TO
from pipeproof.observers.shards import held_here

UNSOUGHT = "the cause was not sought: that is not done in complex parameters; hold real and imaginary parts apart"
_PART = 1 << 16  # elements that are looked at at once
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The elements as integers, flat: equal where all bits are equal. A quantised tensor counts as its values."""
    flat = _plain(tensor).contiguous().reshape(-1)
    return flat.view(_WORDS[min(8, flat.element_size())])


def numbers(tensor: Tensor) -> Tensor:
    """The elements as real numbers, flat: a complex one as two. Bytes, of a type that has no arithmetic."""
    flat = _plain(tensor).reshape(-1)
    if flat.is_complex():
        return torch.view_as_real(flat).reshape(-1)
    return flat if _counts(flat.dtype) else flat.contiguous().view(torch.uint8)


def in_fp64(tensor: Tensor) -> Tensor:
    """The elements as real numbers in fp64, flat."""
    return numbers(tensor).double()


def is_rounded(dtype: torch.dtype) -> bool:
    """Whether numbers of ``dtype`` are rounded when they are stored: integers and truth values are not."""
    return dtype.is_floating_point or dtype.is_complex


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is infinite or not a number."""
    if not is_rounded(tensor.dtype):
        return True
    return all(bool(part.isfinite().all()) for part in _parts(tensor))


def any_nonzero(tensor: Tensor) -> bool:
    """Whether some element is not zero."""
    return any(bool(part.any()) for part in _parts(tensor))


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The elements part by part, those of a single byte in a type that torch can compute with."""
    flat = numbers(tensor)
    for start in range(0, flat.numel(), _PART):
        part = flat[start : start + _PART]
        yield part if part.element_size() > 1 else part.float()


def _plain(tensor: Tensor) -> Tensor:
    """The tensor without a conjugation or a sign that is still to come, and without a scale of its own."""
    found = tensor.detach()
    return found.dequantize() if found.is_quantized else found.resolve_conj().resolve_neg()


def _counts(dtype: torch.dtype) -> bool:
    """Whether torch can make fp64 of ``dtype``."""
    name = str(dtype).removeprefix("torch.")
    return not name.startswith(("bits", "float4"))


_ADDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_DIRECTIONS = 4
_FEW = 16
_ROW = 65_521  # signs in a direction


def digest(tensor: Tensor) -> bytes:
    """Equal for tensors of one shape and type that are equal bit for bit, and for no others."""
    # A copy: numpy would pin the storage, which its owner may want to free, as fully_shard does.
    whole = tensor.detach().to("cpu", copy=True)
    found = hashlib.sha256(f"{whole.dtype}{list(whole.shape)}".encode())  # processors have instructions for it
    content: Any = bits(whole).view(torch.uint8).numpy()
    found.update(content)
    return found.digest()


def contents(model: nn.Module) -> dict[str, bytes]:
    """The digest of every parameter by name, each name of a tied one too; of what this rank has of it."""
    return {name: digest(held_here(one)) for name, one in model.named_parameters(remove_duplicate=False)}


@dataclass(frozen=True)
class Sketch:
    """A tensor's form, its digest, its norm and its projections onto a few fixed random directions.

    The projections of a difference have its norm as their expected size, so they tell how far apart two tensors are.
    The digest is of the values: a zero has no sign there. ``narrow`` is the type, narrower than its own, that every
    element can be said in; empty if there is none. ``said`` has the digest of the tensor in each such type. ``bits`` is
    the sum of all elements read as integers, which no order changes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: bytes
    norm: float
    projections: tuple[float, ...]
    narrow: str = ""
    bits: int = 0
    said: frozenset[bytes] = frozenset()

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

    def widened(self, dtype: torch.dtype) -> "Sketch":
        """That of the tensor as it is in ``dtype``, if that is a wider type; itself otherwise."""
        name = next((name for name, narrow in ROUNDED_TO.items() if narrow == self.dtype != dtype), "")
        wide = name and dtype.is_floating_point and torch.finfo(dtype).eps < torch.finfo(self.dtype).eps
        return replace(self, dtype=dtype, narrow=self.narrow or name) if wide else self

    def distance(self, other: "Sketch") -> float:
        """About the relative Frobenius error of this against ``other``; infinite where they cannot be compared."""
        if self.digest == other.digest:
            return 0.0
        if self.shape != other.shape or self.dtype != other.dtype or not other.norm:
            return math.inf
        squares = [(a - b) ** 2 for a, b in zip(self.projections, other.projections, strict=True)]
        distance = math.sqrt(sum(squares) / len(squares)) / other.norm
        return distance if distance == distance else math.inf

    def factor(self, other: "Sketch") -> float | None:
        """How many times ``other`` this is; None if it is no multiple, as far as projections tell."""
        if self.shape != other.shape or not other.norm or not 0.0 < self.norm < math.inf:
            return None
        pairs = list(zip(self.projections, other.projections, strict=True))
        found = sum(a * b for a, b in pairs) / (sum(b * b for _, b in pairs) or math.inf)
        left = max(abs(a - found * b) for a, b in pairs)
        alike = left <= self.limit * self.norm and abs(abs(found) * other.norm - self.norm) <= self.limit * self.norm
        return found if found and alike else None

    def is_reordered(self, other: "Sketch") -> bool:
        """Whether this has the very elements of ``other``, in another order or another shape."""
        same = (self.dtype, self.bits, math.prod(self.shape)) == (other.dtype, other.bits, math.prod(other.shape))
        alike = abs(self.norm - other.norm) <= self.limit * self.norm
        return same and alike and 0.0 < self.norm and self.digest != other.digest and math.prod(self.shape) >= _FEW

    @property
    def limit(self) -> float:
        """How far another tensor may be and still be taken for this one: half of the digits of its type."""
        return math.sqrt(torch.finfo(self.dtype).eps) if is_rounded(self.dtype) else 0.0

    def is_like(self, other: "Sketch") -> bool:
        """Whether this is ``other`` up to rounding."""
        return self.distance(other) <= other.limit


def sketch(tensor: Tensor, *, known: Sketch | None = None) -> Sketch:
    """The sketch of ``tensor``: ``known`` itself, where it is one of an equal tensor."""
    content = digest(_unsigned(tensor))
    if known is not None and known.digest == content:
        return known
    flat = numbers(tensor.cpu())
    flat = flat.to(flat.dtype if flat.dtype in (torch.float32, torch.float64) else torch.float64)
    form, size = (tuple(tensor.shape), tensor.dtype, content), flat.norm().item()
    narrow = list(_narrow(flat)) if is_rounded(tensor.dtype) else []
    own = tensor if narrow and tensor.dtype in (torch.float32, torch.float64) else None
    said = frozenset() if own is None else frozenset(digest(_unsigned(own.to(ROUNDED_TO[name]))) for name in narrow)
    projections = tuple(_projections(flat).tolist())
    return Sketch(*form, size, projections, next(iter(narrow), ""), _bits(tensor.cpu()), said)


def _unsigned(tensor: Tensor) -> Tensor:
    """``tensor``, but that no zero has a sign: whoever adds up messages loses that, and it is equal without."""
    plain = _plain(tensor)
    return plain + 0.0 if plain.dtype in _ADDED else plain


def _bits(tensor: Tensor) -> int:
    """The sum of the elements as integers of their own width, which wraps around."""
    words = bits(tensor)
    return int(words.sum(dtype=words.dtype))


def _narrow(flat: Tensor) -> Iterator[str]:
    """The narrower types that hold ``flat`` as it is; a few elements soon say that there is none."""
    for name, dtype in ROUNDED_TO.items():
        held = (torch.equal(part.to(dtype).to(part.dtype), part) for part in (flat[:_FEW], flat))
        if dtype != flat.dtype and all(held) and flat.any():
            yield name


def _projections(flat: Tensor) -> Tensor:
    """The sums of the elements with signs, in each direction: so many signs are kept, and turned from row to row.

    Their number is a prime, so that nothing that lies in rows of its own falls on the same signs again and again.
    """
    signs = _signs(_DIRECTIONS, _ROW).to(flat.dtype)
    even = flat.numel() // _ROW * _ROW
    whole, rest = flat[:even].view(-1, _ROW), flat[even:]
    found = (whole @ signs.T * _turns(len(whole)).to(flat.dtype)).sum(0)
    return found + signs[:, : rest.numel()] @ rest


@functools.cache
def _signs(*shape: int) -> Tensor:
    """Signs, the same in every process; a byte each, which is less than the models that are looked at have."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    return (1 - 2 * torch.randint(2, shape, generator=generator)).to(torch.int8)


def _turns(rows: int) -> Tensor:
    """For each row and direction, whether its signs are turned (N, 4)."""
    generator = torch.Generator().manual_seed(_ROW)
    return 1 - 2 * torch.randint(2, (rows, _DIRECTIONS), generator=generator)
