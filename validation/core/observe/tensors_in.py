"""Find tensors in module arguments and results, in any nesting.

Also reports hidden ones: in user objects, sparse tensors, or module attributes.
"""

import gc
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeproof.core.observe.shards import InShards


def tensors_in(values: object) -> list[Tensor]:
    """Return whole, dense tensors; reading a DTensor would need all its ranks."""
    return [leaf for leaf in leaves_in(values, Tensor) if not isinstance(leaf, InShards) and can_be_read(leaf)]


def leaves_in(values: object, kind: type) -> list[Any]:
    """Return leaves with type ``kind``."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, kind)]


_DEPTH = 3  # nesting depth: an object may hold the whole job
_SIMPLE = {str, int, float, bool, bytes, type(None)}  # types without contents, possibly many


def hidden_in(values: object) -> str:
    """Name the first type that hides tensors with gradients; empty if none does."""
    hidden = (leaf for leaf in tree_leaves(values) if not isinstance(leaf, InShards) and _hides(leaf))
    found = next(hidden, None)
    if isinstance(found, Tensor):
        return "a nested Tensor" if found.is_nested else "a sparse Tensor"
    return "" if found is None else type(found).__name__


InAttribute = tuple[nn.Module, str, str]  # owner, attribute, and its dotted path


def inputs_kept(module: nn.Module) -> list[InAttribute]:
    """Return attributes with leaf tensors that require gradients, without parameters."""
    return [
        (part, name, f"{path}.{name}".removeprefix("."))
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor | list | tuple) and [*_leaves(value)]
    ]


def hidden_inputs(kept: Iterable[InAttribute], given: Iterable[Tensor]) -> str:
    """Return the first ``kept`` attribute that received no argument."""
    own = {*map(id, given)}
    those = (path for part, name, path in kept if own.isdisjoint(map(id, _leaves(vars(part).get(name)))))
    return next(those, "")


def _leaves(value: object) -> Iterator[Tensor]:
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, Tensor) and not isinstance(one, nn.Parameter) and one.requires_grad and one.is_leaf:
            yield one


def can_be_read(tensor: Tensor) -> bool:
    """True if the tensor has plain, stored elements."""
    return not tensor.is_meta and tensor.layout is torch.strided


def _hides(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.requires_grad and not leaf.is_meta and not can_be_read(leaf)
    inside = (one for one in _inside(leaf) if isinstance(one, Tensor) and not isinstance(one, nn.Parameter))
    return any(one.requires_grad for one in inside)


def _inside(leaf: object) -> Iterator[object]:
    """Yield an object's contents, to the depth that users nest stage results."""
    found, visited = [leaf], {id(leaf)}
    for _ in range(_DEPTH):
        members = [one for own in found for one in tree_leaves([*_members(own)])]
        found = [*{id(one): one for one in members if type(one) not in _SIMPLE and id(one) not in visited}.values()]
        visited |= {*map(id, found)}
        yield from found


def _members(leaf: object) -> Iterable[object]:
    """Return an object's members, in attributes, slots and containers, as garbage collection sees them.

    So nothing of the user's runs, and no iterator is read, which would consume it.
    """
    if isinstance(leaf, Tensor | nn.Module | ModuleType | type):
        return ()
    if isinstance(leaf, FunctionType):  # its globals are no part of it
        return *gc.get_referents(*(leaf.__closure__ or ())), *vars(leaf).values()
    return gc.get_referents(leaf)
