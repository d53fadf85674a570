"""The tensors in what modules are called with and give back, however they are put together."""

from typing import Any

from torch import Tensor, nn, strided
from torch.utils._pytree import tree_leaves

from pipeproof.observers.shards import InShards


def tensors_in(values: object) -> list[Tensor]:
    """Those that this rank has whole: what is asked of a DTensor, all of its ranks must ask. No sparse ones."""
    return [leaf for leaf in leaves_in(values, Tensor) if not isinstance(leaf, InShards) and _can_be_read(leaf)]


def hidden_in(values: object) -> str:
    """What has tensors that want a gradient, and is not looked into, by its type: empty if there is none."""
    hidden = (leaf for leaf in tree_leaves(values) if not isinstance(leaf, InShards) and _hides(leaf))
    return next((type(leaf).__name__ if not isinstance(leaf, Tensor) else "sparse Tensor" for leaf in hidden), "")


def _can_be_read(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.layout is strided


def _hides(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.requires_grad and not leaf.is_meta and not _can_be_read(leaf)
    own = {} if isinstance(leaf, nn.Module | type) else getattr(leaf, "__dict__", {})
    tensors = (one for one in tree_leaves([*own.values()]) if isinstance(one, Tensor))
    return any(one.requires_grad and not isinstance(one, nn.Parameter) for one in tensors)


def leaves_in(values: object, kind: type) -> list[Any]:
    """Those of a ``kind``."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, kind)]
