"""A tensor's elements, as they are and as numbers, of whatever type they are."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

_PART, _PART_ON_DEVICE = 1 << 16, 1 << 24  # elements that are looked at at once: a device is waited for each time
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The elements as integers, flat: equal where all bits are equal. A quantised tensor counts as its values."""
    flat = plain(tensor).contiguous().reshape(-1)
    return flat.view(_WORDS[min(8, flat.element_size())])


def numbers(tensor: Tensor) -> Tensor:
    """The elements as real numbers, flat: a complex one as two. Bytes, of a type that has no arithmetic."""
    flat = plain(tensor).reshape(-1)
    if flat.is_complex():
        return torch.view_as_real(flat).reshape(-1)
    return flat if _counts(flat.dtype) else flat.contiguous().view(torch.uint8)


def in_fp64(tensor: Tensor) -> Tensor:
    """The elements as real numbers in fp64, flat; on the host where their device has none."""
    return numbers(tensor if has_fp64(tensor.device) else tensor.cpu()).double()


@functools.cache
def has_fp64(device: torch.device) -> bool:
    """Whether tensors of fp64 can be made there."""
    try:
        return torch.zeros(1, dtype=torch.float64, device=device).is_floating_point()
    except (RuntimeError, TypeError):
        return False


def version(tensor: Tensor) -> int | None:
    """How often it was written to; None where nobody counts, as in inference mode."""
    return None if tensor.is_inference() else tensor._version


def is_rounded(dtype: torch.dtype) -> bool:
    """Whether numbers of ``dtype`` are rounded when they are stored: integers and truth values are not."""
    return dtype.is_floating_point or dtype.is_complex


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is infinite or not a number."""
    if not is_rounded(tensor.dtype):
        return True
    return all(bool(part.isfinite().all()) for part in _parts(tensor))


def any_nan(tensor: Tensor) -> bool:
    """Whether some element is not a number."""
    return is_rounded(tensor.dtype) and any(bool(part.isnan().any()) for part in _parts(tensor))


def any_nonzero(tensor: Tensor) -> bool:
    """Whether some element is not zero."""
    return any(bool(part.any()) for part in _parts(tensor))


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The elements part by part, those of a single byte in a type that torch can compute with."""
    flat = numbers(tensor)
    size = _PART if flat.is_cpu else _PART_ON_DEVICE
    for start in range(0, flat.numel(), size):
        part = flat[start : start + size]
        yield part if part.element_size() > 1 else part.float()


def plain(tensor: Tensor) -> Tensor:
    """The tensor without a conjugation or a sign that is still to come, and without a scale of its own."""
    found = tensor.detach()
    return found.dequantize() if found.is_quantized else found.resolve_conj().resolve_neg()


def _counts(dtype: torch.dtype) -> bool:
    """Whether torch can make fp64 of ``dtype``."""
    name = str(dtype).removeprefix("torch.")
    return not name.startswith(("bits", "float4"))
