"""Buffers in flight: their contents, the life of their memory, and racing code.

Contents are those of ``tensor.data``, on the same memory, without history, with its own version counter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeproof.core.observe.elements import byte_range
from pipeproof.core.observe.stack import Stack
from pipeproof.wings.simulated.torch_inside import Memory, unwatch
from pipeproof.worlds.rank_report import Race

Version = tuple[int, tuple[int, ...], tuple[int, ...]]  # of a tensor: the number, its shape and its strides


@unwatch
def poison(tensors: Sequence[Tensor]) -> None:
    """Fill buffers with values that correct code never uses: NaN, or the largest number of their type."""
    for tensor in tensors:
        worst: float = float("nan")
        if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            worst = True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max
        tensor.data.fill_(worst)


@unwatch
def copies(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copy the current contents of buffers."""
    return tuple(tensor.data.clone() for tensor in tensors)


@unwatch
def is_unchanged(tensors: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """True if buffers hold the same bits as before."""
    bits = [[one.data.contiguous().reshape(-1).view(torch.uint8) for one in some] for some in (tensors, before)]
    return all(torch.equal(one, other) for one, other in zip(*bits, strict=True))


def versions(tensors: Sequence[Tensor]) -> list[Version]:
    """Return, for each tensor or its base, autograd's count of writes, and its shape."""
    return [(0 if one.is_inference() else one._version, tuple(one.shape), one.stride()) for one in tensors]


def fit(contents: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """True if buffers match ``contents`` in types and numbers of elements."""
    one, other = ([(tensor.numel(), tensor.dtype) for tensor in some] for some in (contents, tensors))
    return one == other


def describe(tensors: Sequence[Tensor]) -> str:
    """Their types and shapes."""
    return ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)


@unwatch
def overlap(one: Tensor, other: Tensor) -> bool:
    """True if two tensors share memory."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    here, there = byte_range(one), byte_range(other)
    if max(here.start, there.start) >= min(here.stop, there.stop):
        return False
    whole = one.is_contiguous() and other.is_contiguous()
    return whole or one.element_size() != other.element_size() or not _elements(one).isdisjoint(_elements(other))


@unwatch
def is_within(one: Tensor, other: Tensor) -> bool:
    """True if another tensor's memory contains this one's."""
    here, there = byte_range(one), byte_range(other)
    return overlap(one, other) and there.start <= here.start and here.stop <= there.stop


def race(kind: str, rank: int, said: str, **stacks: Stack) -> Race:
    """The error: a sentence, and for each stack, by what ran there, its innermost line."""
    return Race(kind, rank, said, tuple((what.replace("_", " "), stack[0]) for what, stack in stacks.items() if stack))


def _elements(tensor: Tensor) -> set[int]:
    """Return the offsets of its elements in its storage."""
    places = torch.tensor(int(tensor.storage_offset()))
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = places[..., None] + step * torch.arange(size)
    return set(places.flatten().tolist())


class HeldTensors:
    """Tensors and their contents at construction. It keeps objects and, like a transport, addresses of memory.

    Memory can go before its tensor: another replaces it (``tensor.data = other``), or it is resized.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.before = self._asked = copies(tensors)
        self._memory = [Memory(tensor) for tensor in tensors]

    @property
    def freed(self) -> bool:
        """True if some memory was freed or moved."""
        return any(one.tensor is None for one in self._memory)

    @property
    def changed(self) -> bool:
        """True if the contents changed."""
        there = self._there()
        return there is not None and not is_unchanged(there, self.before)

    def was_written(self) -> bool:
        """True if memory was written since the last call, or is gone."""
        before, self._asked = self._asked, self.contents
        return self.freed or not is_unchanged(self._asked, before)

    @property
    def contents(self) -> tuple[Tensor, ...]:
        """Return the current contents; for freed memory, the last ones."""
        there = self._there()
        return tuple(self.before) if there is None else copies(there)

    @unwatch
    def fill(self, contents: Sequence[Tensor]) -> None:
        """Write ``contents`` into the remaining memory like a transport, unseen by autograd."""
        if (there := self._there()) is not None:
            for tensor, content in zip(there, contents, strict=True):
                tensor.data.copy_(content.view(tensor.shape) if content.numel() == tensor.numel() else content)

    @unwatch
    def _there(self) -> list[Tensor] | None:
        there = [tensor for one in self._memory if (tensor := one.tensor) is not None]
        return there if len(there) == len(self._memory) else None


NOTHING_HELD = HeldTensors(())
