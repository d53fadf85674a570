"""The elements of a tensor of any type: as they lie in memory, and as real numbers."""

from collections.abc import Iterator

import torch
from torch import Tensor

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
