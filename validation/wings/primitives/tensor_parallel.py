"""Tensor parallelism by torch's ``parallelize_module``: attention by heads, feedforward layers by columns and rows.

The embedding is cut along the vocabulary, and so are the logits, of which ``loss_parallel`` makes the loss.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from pipeproof.wings.primitives.layers import Embedding, Head
from pipeproof.wings.primitives.part import RankPart

Plan = dict[str, ParallelStyle]


def of_block() -> Plan:
    """Cut a block's weights; other parameters stay whole on every rank."""
    columns = ("attention.queries", "attention.keys", "attention.values", "feedforward.up")
    rows = ("attention.output", "feedforward.down")
    return {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}


def of_embedding() -> Plan:
    """Look up this rank's part of the vocabulary."""
    return {"tokens": RowwiseParallel(input_layouts=Replicate())}


def of_head() -> Plan:
    """Compute logits for this rank's part of the vocabulary."""
    return {"output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}


def cut(stage: Any, mesh: DeviceMesh) -> nn.Module:
    """Apply the plans to every layer of ``stage``, in place."""
    for layer in stage:
        plan = of_embedding() if isinstance(layer, Embedding) else of_head() if isinstance(layer, Head) else of_block()
        present = {name: style for name, style in plan.items() if name in dict(layer.named_modules())}
        parallelize_module(layer, mesh, present)
    return stage  # type: ignore[no-any-return]


TENSOR_PARALLEL = RankPart(cut, around=loss_parallel)
