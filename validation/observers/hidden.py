"""Tensors that nobody sees pass, for they are in objects of a user's own, or sparse."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeproof.observers.shards import InShards


def hidden_in(values: object) -> str:
    """What has tensors that want a gradient, and is not looked into, by its type: empty if there is none."""
    hidden = (leaf for leaf in tree_leaves(values) if not isinstance(leaf, InShards) and _hides(leaf))
    return next((type(leaf).__name__ if not isinstance(leaf, Tensor) else "sparse Tensor" for leaf in hidden), "")


def can_be_read(tensor: Tensor) -> bool:
    """Whether its numbers are there, each in its place."""
    return not tensor.is_meta and tensor.layout is torch.strided


def _hides(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.requires_grad and not leaf.is_meta and not can_be_read(leaf)
    own = [] if isinstance(leaf, nn.Module | type) else [*_members(leaf)]
    tensors = (one for one in tree_leaves(own) if isinstance(one, Tensor))
    return any(one.requires_grad and not isinstance(one, nn.Parameter) for one in tensors)


def _members(leaf: object) -> Iterator[object]:
    """What an object has, as a class of a user's own may keep it."""
    yield from getattr(leaf, "__dict__", {}).values()
    slots = [one.__dict__.get("__slots__", ()) for one in type(leaf).__mro__]
    names = [name for one in slots for name in ([one] if isinstance(one, str) else one)]
    yield from (getattr(leaf, name, None) for name in names)
    if isinstance(leaf, Mapping):
        yield from leaf.values()
    elif isinstance(leaf, list | tuple | set | frozenset):
        yield from leaf
