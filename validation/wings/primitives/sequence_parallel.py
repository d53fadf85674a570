"""Tensor parallelism whose norms and residuals hold a part of every sequence: torch's ``SequenceParallel``."""

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
    """Sequences are gathered before attention and the feedforward layer, and scattered behind them."""
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
    """The norm is of a part of each sequence; logits are of all of it, and of a part of the vocabulary."""
    output = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    return {"norm": SequenceParallel(), "output": output}


def of_embedding() -> Plan:
    """Each rank looks up its part of the vocabulary, and all add it up."""
    return {"tokens": RowwiseParallel(input_layouts=Replicate())}


def scattered() -> PrepareModuleOutput:
    """Of what an embedding puts out, this rank's part of every sequence."""
    return PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),))


def cut(stage: Any, mesh: DeviceMesh) -> nn.Module:
    """Every layer of ``stage`` by its plan, in place."""
    for layer in stage:
        embeds = isinstance(layer, Embedding)
        parallelize_module(
            layer, mesh, of_embedding() if embeds else of_head() if isinstance(layer, Head) else of_block()
        )
        if embeds:
            parallelize_module(layer, mesh, scattered())
    return stage  # type: ignore[no-any-return]


SEQUENCE_PARALLEL = RankPart(cut, around=loss_parallel)
