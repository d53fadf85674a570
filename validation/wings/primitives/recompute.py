"""Recompute: torch's ``checkpoint``, around whole blocks or the core of attention, or keeping what costs most."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from pipeproof.wings.primitives.layers import Attention, Embedding, Head
from pipeproof.wings.primitives.part import RankPart

KEPT = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
REENTRANT: dict[str, Any] = {"use_reentrant": True}
OTHER: dict[str, Any] = {"use_reentrant": False}
SELECTIVE: dict[str, Any] = OTHER | {"context_fn": partial(create_selective_checkpoint_contexts, KEPT)}


def again(function: Callable[..., Any], *given: Tensor, **how: Any) -> Any:
    """Call ``function``; its backward recomputes intermediate results."""
    return checkpoint(function, *given, **how)


def block_again(layer: nn.Module, *given: Tensor, **how: Any) -> Any:
    """Recompute a block, but no embedding, whose input needs no gradient, and no head, whose backward is next."""
    return layer(*given) if isinstance(layer, Embedding | Head) else again(layer, *given, **how)


def of_blocks(stage: Any, mesh: DeviceMesh, **how: Any) -> nn.Module:
    """Recompute every block of ``stage``. In place."""
    stage.call = partial(block_again, **how)
    return stage  # type: ignore[no-any-return]


def of_attention(stage: nn.Module, mesh: DeviceMesh, **how: Any) -> nn.Module:
    """Recompute attention on queries, keys and values, like Korthikanti and others, 2022. In place."""
    for module in stage.modules():
        if isinstance(module, Attention):
            module.attend = partial(again, module.attend, **how)
    return stage


PARTS = {
    "recompute": RankPart(partial(of_blocks, **OTHER)),
    "recompute-reentrant": RankPart(partial(of_blocks, **REENTRANT)),
    "recompute-selective": RankPart(partial(of_blocks, **SELECTIVE)),
    "recompute-attention": RankPart(partial(of_attention, **OTHER)),
    "recompute-attention-reentrant": RankPart(partial(of_attention, **REENTRANT)),
}
