"""The tensors in what modules are called with and give back, however they are put together."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeproof.observers.hidden import can_be_read
from pipeproof.observers.shards import InShards


def tensors_in(values: object) -> list[Tensor]:
    """Those that this rank has whole: what is asked of a DTensor, all of its ranks must ask. No sparse ones."""
    return [leaf for leaf in leaves_in(values, Tensor) if not isinstance(leaf, InShards) and can_be_read(leaf)]


def leaves_in(values: object, kind: type) -> list[Any]:
    """Those of a ``kind``."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, kind)]
