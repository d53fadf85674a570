"""The tensors in what modules are called with and give back, however they are put together.

Those that nobody sees pass are told, too: in objects of a user's own, sparse, or in an attribute of the module.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeproof.core.observe.shards import InShards


def tensors_in(values: object) -> list[Tensor]:
    """Those that this rank has whole: what is asked of a DTensor, all of its ranks must ask. No sparse ones."""
    return [leaf for leaf in leaves_in(values, Tensor) if not isinstance(leaf, InShards) and can_be_read(leaf)]


def leaves_in(values: object, kind: type) -> list[Any]:
    """Those of a ``kind``."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, kind)]


_DEPTH = 3  # of objects in objects: one may have the whole job in it
_SIMPLE = {str, int, float, bool, bytes, type(None)}  # have nothing in them, and there may be many


def hidden_in(values: object) -> str:
    """What has tensors that want a gradient, and is not looked into, by its type: empty if there is none."""
    hidden = (leaf for leaf in tree_leaves(values) if not isinstance(leaf, InShards) and _hides(leaf))
    return next(map(_kind, hidden), "")


InAttribute = tuple[nn.Module, str, str]  # a module in another one, its attribute, and how that is called from there


def inputs_kept(module: nn.Module) -> list[InAttribute]:
    """The attributes in which it has tensors that want a gradient, are no parameters, and that nobody computed."""
    return [
        (part, name, f"{path}.{name}".removeprefix("."))
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor | list | tuple) and [*_leaves(value)]
    ]


def hidden_inputs(kept: Iterable[InAttribute], given: Iterable[Tensor]) -> str:
    """Of attributes that a module ``kept`` when it was called the first that it did not put what it was given into."""
    own = {*map(id, given)}
    those = (path for part, name, path in kept if own.isdisjoint(map(id, _leaves(vars(part).get(name)))))
    return next(those, "")


def _leaves(value: object) -> Iterator[Tensor]:
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, Tensor) and not isinstance(one, nn.Parameter) and one.requires_grad and one.is_leaf:
            yield one


def can_be_read(tensor: Tensor) -> bool:
    """Whether its numbers are there, each in its place."""
    return not tensor.is_meta and tensor.layout is torch.strided


def _kind(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    return "a nested Tensor" if leaf.is_nested else "a sparse Tensor"


def _hides(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.requires_grad and not leaf.is_meta and not can_be_read(leaf)
    inside = (one for one in _inside(leaf) if isinstance(one, Tensor) and not isinstance(one, nn.Parameter))
    return any(one.requires_grad for one in inside)


def _inside(leaf: object) -> Iterator[object]:
    """What is in an object, and in objects in it: no deeper than somebody nests what a stage gives."""
    found, seen = [leaf], {id(leaf)}
    for _ in range(_DEPTH):
        members = [one for own in found for one in tree_leaves([*_members(own)])]
        found = [*{id(one): one for one in members if type(one) not in _SIMPLE and id(one) not in seen}.values()]
        seen |= {*map(id, found)}
        yield from found


def _members(leaf: object) -> Iterator[object]:
    """What an object has, as a class of a user's own may keep it."""
    if isinstance(leaf, Tensor | nn.Module | type):
        return
    yield from getattr(leaf, "__dict__", {}).values()
    for one in type(leaf).__mro__:
        slots = one.__dict__.get("__slots__", ())
        names = [slots] if isinstance(slots, str) else slots
        yield from (getattr(leaf, _mangled(name, one), None) for name in names)
    if isinstance(leaf, Mapping):
        yield from leaf.values()
    elif isinstance(leaf, list | tuple | set | frozenset):
        yield from leaf
    elif isinstance(leaf, FunctionType):
        yield from gc.get_referents(*(leaf.__closure__ or ()))
    elif isinstance(leaf, partial | MethodType | Iterator):  # one that is asked has one less to give
        yield from gc.get_referents(leaf)


def _mangled(name: str, owner: type) -> str:
    """A private ``name`` as Python keeps it."""
    private = name.startswith("__") and not name.endswith("__")
    return f"_{owner.__name__.lstrip('_')}{name}" if private else name
