"""The digest of a tensor, or of a structure of them: equal for equal bits, whatever device they are on."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from validation.observers.elements import bits


class ContentError(ValueError):
    """Something that has no digest."""


def digest(value: object) -> str:
    """SHA-256 of tensors, numbers, text and None, and of tuples, lists and dicts of these; as hexadecimal digits."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def _feed(found: "hashlib._Hash", value: object) -> None:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise ContentError("a sparse tensor has no digest: make it dense, with to_dense()")
        if value.is_quantized:
            raise ContentError("a quantised tensor has no digest: it has a scale beside its elements; dequantize() it")
        found.update(f"{value.dtype} {list(value.shape)}\n".encode())
        found.update(_bytes(value))
    elif isinstance(value, tuple | list):
        found.update(f"({len(value)}\n".encode())
        for part in value:
            _feed(found, part)
    elif isinstance(value, Mapping):
        found.update(f"{{{len(value)}\n".encode())
        for name in sorted(value, key=str):
            _feed(found, (str(name), value[name]))
    elif value is None or isinstance(value, str | int | float):
        found.update(f"{value!r}\n".encode())
    else:
        raise ContentError(f"a {type(value).__name__} has no digest: expected tensors, numbers or text")


def _bytes(tensor: Tensor) -> memoryview:
    return bits(tensor.cpu()).view(torch.uint8).numpy().data
