"""Tensor elements as bits and as numbers, for all types."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

_PART, _PART_ON_DEVICE = 1 << 16, 1 << 24  # elements per look: each one synchronizes with the device
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """Return flat integers that are equal for equal bits. Quantised tensors count as their values."""
    flat = plain(tensor).contiguous().reshape(-1)
    return flat.view(_WORDS[min(8, flat.element_size())])


def numbers(tensor: Tensor) -> Tensor:
    """Return flat real numbers: two per complex element. Types without arithmetic give bytes."""
    flat = plain(tensor).reshape(-1)
    if flat.is_complex():
        return torch.view_as_real(flat).reshape(-1)
    odd = str(flat.dtype).removeprefix("torch.").startswith(("bits", "float4"))  # torch cannot convert it to fp64
    return flat.contiguous().view(torch.uint8) if odd else flat


def in_fp64(tensor: Tensor) -> Tensor:
    """Return flat fp64 numbers, on the host if the device lacks fp64."""
    return numbers(tensor if has_fp64(tensor.device) else tensor.cpu()).double()


@functools.cache
def has_fp64(device: torch.device) -> bool:
    """True if the device supports fp64."""
    try:
        return torch.zeros(1, dtype=torch.float64, device=device).is_floating_point()
    except (RuntimeError, TypeError):
        return False


def version(tensor: Tensor) -> int | None:
    """Return the tensor's write count. None if uncounted, as in inference mode."""
    return None if tensor.is_inference() else tensor._version


def is_rounded(dtype: torch.dtype) -> bool:
    """True for types with rounding: integers and booleans have none."""
    return dtype.is_floating_point or dtype.is_complex


def all_finite(tensor: Tensor) -> bool:
    """True if all elements are finite."""
    if not is_rounded(tensor.dtype):
        return True
    return all(bool(part.isfinite().all()) for part in _parts(tensor))


def any_nan(tensor: Tensor) -> bool:
    """True if any element is NaN."""
    return is_rounded(tensor.dtype) and any(bool(part.isnan().any()) for part in _parts(tensor))


def any_nonzero(tensor: Tensor) -> bool:
    """True if any element is nonzero."""
    return any(bool(part.any()) for part in _parts(tensor))


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield elements in parts; single-byte types come in a computable type."""
    flat = numbers(tensor)
    size = _PART if flat.is_cpu else _PART_ON_DEVICE
    for start in range(0, flat.numel(), size):
        part = flat[start : start + size]
        yield part if part.element_size() > 1 else part.float()


def plain(tensor: Tensor) -> Tensor:
    """Resolve conjugation, negation and quantisation."""
    found = tensor.detach()
    return found.dequantize() if found.is_quantized else found.resolve_conj().resolve_neg()


def byte_range(tensor: Tensor) -> range:
    """Return the tensor's byte range in its storage."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    first = tensor.storage_offset() * tensor.element_size()
    return range(first, first + count * tensor.element_size())
