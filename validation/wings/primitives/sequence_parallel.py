"""Tensor parallelism with norms and residuals split along sequences: torch's ``SequenceParallel``."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from pipeproof.wings.primitives.layers import Embedding, Head
from pipeproof.wings.primitives.part import RankPart
from pipeproof.wings.primitives.tensor_parallel import Plan


def of_block() -> Plan:
    """Gather sequences before attention and feedforward layers, and scatter behind."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    columns = ("attention.queries", "attention.keys", "attention.values", "feedforward.up")
    return {
        "attention_norm": SequenceParallel(),
        "norm": SequenceParallel(),
        "attention": gathered,
        "feedforward": gathered,
        **{name: ColwiseParallel() for name in columns},
        "attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "feedforward.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def of_head() -> Plan:
    """Split the norm along sequences, and logits along the vocabulary."""
    output = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    return {"norm": SequenceParallel(), "output": output}


def of_embedding() -> Plan:
    """Look up this rank's part of the vocabulary, and sum over ranks."""
    return {"tokens": RowwiseParallel(input_layouts=Replicate())}


def scatter_embedding() -> PrepareModuleOutput:
    """Return this rank's part of an embedding's output, along sequences."""
    return PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),))


def cut(stage: Any, mesh: DeviceMesh) -> nn.Module:
    """Apply the plans to every layer of ``stage``, in place."""
    for layer in stage:
        embeds = isinstance(layer, Embedding)
        parallelize_module(
            layer, mesh, of_embedding() if embeds else of_head() if isinstance(layer, Head) else of_block()
        )
        if embeds:
            parallelize_module(layer, mesh, scatter_embedding())
    return stage  # type: ignore[no-any-return]


SEQUENCE_PARALLEL = RankPart(cut, around=loss_parallel)
