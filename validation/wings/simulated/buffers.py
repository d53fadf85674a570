"""Buffers on their way: what is in them, whether that memory is still there, what code does there that is a race."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeproof.core.observe.stack import Stack
from pipeproof.wings.simulated.torch_inside import Memory, unwatched
from pipeproof.worlds.rank_report import Race

Version = tuple[int, tuple[int, ...], tuple[int, ...]]  # of a tensor: the number, its shape and its strides


@unwatched
def poison(tensors: Sequence[Tensor]) -> None:
    """Fill buffers with what no right code would compute with: NaN, or the largest number of their type."""
    for tensor in tensors:
        _bare(tensor).fill_(_worst(tensor.dtype))


@unwatched
def fill(tensors: Sequence[Tensor], contents: Sequence[Tensor]) -> None:
    """Write ``contents`` into buffers as a transport does, which autograd does not see."""
    for tensor, content in zip(tensors, contents, strict=True):
        _bare(tensor).copy_(content.view(tensor.shape) if content.numel() == tensor.numel() else content)


@unwatched
def copies(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What is in buffers now."""
    return tuple(_bare(tensor).clone() for tensor in tensors)


@unwatched
def unchanged(tensors: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Whether buffers hold the same bits as before."""
    return all(torch.equal(_bits(_bare(one)), _bits(other)) for one, other in zip(tensors, before, strict=True))


def versions(tensors: Sequence[Tensor]) -> list[Version]:
    """How often functions of torch have written into each or its base, where autograd counts, and its shape."""
    return [(0 if one.is_inference() else one._version, tuple(one.shape), one.stride()) for one in tensors]


def fit(contents: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Whether buffers have as many elements as ``contents``, of the same types."""
    one, other = ([(tensor.numel(), tensor.dtype) for tensor in some] for some in (contents, tensors))
    return one == other


def described(tensors: Sequence[Tensor]) -> str:
    """Their types and shapes."""
    return ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)


def place_of(tensor: Tensor) -> int:
    """Where the memory begins of which a tensor is all or a part."""
    return tensor.untyped_storage().data_ptr()


@unwatched
def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have memory in common."""
    if place_of(one) != place_of(other):
        return False
    here, there = _span(one), _span(other)
    if max(here.start, there.start) >= min(here.stop, there.stop):
        return False
    whole = one.is_contiguous() and other.is_contiguous()
    return whole or one.element_size() != other.element_size() or not _elements(one).isdisjoint(_elements(other))


@unwatched
def within(one: Tensor, other: Tensor) -> bool:
    """Whether all memory of a tensor is another's."""
    here, there = _span(one), _span(other)
    return overlap(one, other) and there.start <= here.start and here.stop <= there.stop


def race(kind: str, rank: int, said: str, **stacks: Stack) -> Race:
    """The error: a sentence, and for each stack, by what ran there, its innermost line."""
    return Race(kind, rank, said, tuple((what.replace("_", " "), stack[0]) for what, stack in stacks.items() if stack))


def _span(tensor: Tensor) -> range:
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((length - 1) * step for length, step in steps) if tensor.numel() else 0
    return range(first, first + count * size)


def _elements(tensor: Tensor) -> set[int]:
    """Where its elements lie in its storage."""
    places = torch.tensor(int(tensor.storage_offset()))
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + step * torch.arange(size)
    return set(places.flatten().tolist())


def _bare(tensor: Tensor) -> Tensor:
    """The same memory, with no history and a version of its own."""
    return tensor.data


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _worst(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


class HeldTensors:
    """Tensors as they are when this is made. As a transport does, it keeps the objects, and of their memory an address.

    Memory can go while its tensor is there: another is put in its place (``tensor.data = other``), or it is resized.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.before = copies(tensors)
        self._memory = [Memory(tensor) for tensor in tensors]

    @property
    def freed(self) -> bool:
        """Whether some of the memory is no longer there, or no longer where it was."""
        return any(one.tensor is None for one in self._memory)

    @property
    def changed(self) -> bool:
        """Whether what is in it is not what was."""
        there = self._there()
        return there is not None and not unchanged(there, self.before)

    def differs(self, contents: Sequence[Tensor]) -> bool:
        """Whether what is in it is not ``contents``, or its memory is gone."""
        return self.freed or not unchanged(self.contents, contents)

    @property
    def contents(self) -> tuple[Tensor, ...]:
        """What is in it now; of memory that is gone, what was."""
        there = self._there()
        return tuple(self.before) if there is None else copies(there)

    def fill(self, contents: Sequence[Tensor]) -> None:
        """Write this into the memory, where it is there."""
        if (there := self._there()) is not None:
            fill(there, contents)

    @unwatched
    def _there(self) -> list[Tensor] | None:
        there = [tensor for one in self._memory if (tensor := one.tensor) is not None]
        return there if len(there) == len(self._memory) else None


NOTHING_HELD = HeldTensors(())
