"""Tensors at a stage boundary: their shapes, and how the receiver learns them.

Legend: S stages, M microbatches.
"""

import json
import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

HEADER_BYTES = 4096
_HOST = torch.device("cpu")
Tensors = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]


class BoundaryError(ValueError):
    """A value that cannot cross a stage boundary."""


class TensorSpec(NamedTuple):
    """A receiver's information to make room for a tensor, and whether it owes a gradient for it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        # Later kernels, and so the last bit, can depend on the strides. empty_like keeps those of a dense tensor and
        # packs any other; a contiguous one may still carry odd strides along dimensions of size 1.
        shape = tuple(tensor.shape)
        stride = _row_major(shape) if tensor.is_contiguous() else tuple(torch.empty_like(tensor).stride())
        return cls(shape, stride, tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@lru_cache(maxsize=1024)
def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


Specs = tuple[TensorSpec, ...]


def encode_specs(specs: Specs) -> Tensor:
    """Encode ``specs`` as a byte tensor of fixed length: the receiver can post it without knowing any shape."""
    rows = [[spec.shape, spec.stride, str(spec.dtype).removeprefix("torch."), spec.requires_grad] for spec in specs]
    text = json.dumps(rows, separators=(",", ":")).encode()
    if len(text) > HEADER_BYTES:
        raise BoundaryError(
            f"a stage hands on {len(specs)} tensors, whose shapes take {len(text)} bytes to describe: "
            f"expected at most {HEADER_BYTES}; pack some of them into one tensor"
        )
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)


def decode_specs(header: Tensor) -> Specs:
    """Invert ``encode_specs``."""
    rows = json.loads(bytes(header.tolist()))
    return tuple(
        TensorSpec(tuple(shape), tuple(stride), getattr(torch, name), grad) for shape, stride, name, grad in rows
    )


def signature(inputs: Tensors) -> Hashable:
    """A key for the shapes of all boundaries: microbatches with equal signatures have equal boundaries."""
    return tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in inputs)


def as_tensors(value: object, owner: str) -> Tensors:
    """Convert ``value`` to a tuple of tensors; errors name ``owner``."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple | list) and value and all(isinstance(member, Tensor) for member in value):
        return tuple(value)
    kind = type(value).__name__
    if isinstance(value, tuple | list):
        kind += f" of {', '.join(type(member).__name__ for member in value) or 'nothing'}"
    raise BoundaryError(f"{owner} is a {kind}: expected a tensor, or a tuple of tensors")


class _Place(NamedTuple):
    """A travelling member's place in the buffer, in bytes."""

    member: int
    spec: TensorSpec
    start: int
    end: int


@dataclass(frozen=True)
class Layout:
    """Layout of a boundary's members in a single byte buffer.

    With ``presence`` a byte per travelling member follows at the end: a gradient may be missing for a microbatch that
    did not use the member, and zeros in its place would turn the None of the parameters behind it into zeros.
    """

    specs: Specs
    places: tuple[_Place, ...]
    nbytes: int
    presence: bool

    def pack(self, members: Gradients) -> Tensor:
        """Pack ``members`` into one byte tensor, without a copy for a single member that always travels."""
        device = next(iter([member.device for member in members if member is not None]), _HOST)
        pieces, marks, end = [], [], 0
        for number, spec, start, stop in self.places:
            if start > end:
                pieces.append(_constant(bytes(start - end), device))
            member, end = members[number], stop
            if member is None:
                pieces.append(torch.zeros(end - start, dtype=torch.uint8, device=device))
            else:
                pieces.append(_bytes_of(member, spec))
            marks.append(member is not None)
        if self.presence:
            pieces.append(_constant(bytes(marks), device))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def unpack(self, buffer: Tensor) -> Gradients:
        """Invert ``pack``: views into ``buffer``, None for a member that is missing or does not travel."""
        members: list[Tensor | None] = [None] * len(self.specs)
        marks = buffer[-len(self.places) :].tolist() if self.presence else (True,) * len(self.places)
        for place, present in zip(self.places, marks, strict=True):
            if present:
                members[place.member] = _member(buffer, place)
        return tuple(members)

    def leaves(self, buffer: Tensor) -> Tensors:
        """Unpack an activation, with members requiring a gradient as on the sender."""
        return tuple([_member(buffer, place).requires_grad_(place.spec.requires_grad) for place in self.places])


@lru_cache(maxsize=1024)
def activations(specs: Specs) -> Layout:
    """The layout of a forward message: every member travels."""
    return _lay_out(specs, [True] * len(specs), presence=False)


@lru_cache(maxsize=1024)
def gradients(specs: Specs) -> Layout:
    """The layout of the answering backward message: members that require a gradient."""
    owed = [spec.requires_grad for spec in specs]
    return _lay_out(specs, owed, presence=any(owed))


def _lay_out(specs: Specs, travels: list[bool], *, presence: bool) -> Layout:
    places: list[_Place] = []
    end = 0
    for number, spec in enumerate(specs):
        if travels[number]:
            widest = torch.complex128.itemsize  # any dtype can be viewed at a multiple of it
            start = -(-end // widest) * widest
            end = start + spec.nbytes
            places.append(_Place(number, spec, start, end))
    return Layout(specs, tuple(places), end + presence * len(places), presence)


@lru_cache(maxsize=256)
def _constant(content: bytes, device: torch.device) -> Tensor:
    """Make ``content`` a tensor, for reading only."""
    return torch.tensor(list(content), dtype=torch.uint8, device=device)


def _bytes_of(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """View ``tensor``'s elements in memory order by ``spec``; copy only for other strides."""
    tensor = tensor.resolve_conj().resolve_neg()
    if spec.stride == _row_major(spec.shape):
        return tensor.detach().contiguous().view(-1).view(torch.uint8)
    if tensor.stride() != spec.stride:
        tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=tensor.device).copy_(tensor)
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _member(buffer: Tensor, place: _Place) -> Tensor:
    _, spec, start, end = place
    part = buffer if end - start == len(buffer) else buffer[start:end]
    # .data: each member has a version of its own, so that a stage may change one of them in place.
    return part.view(spec.dtype).as_strided(spec.shape, spec.stride).data
