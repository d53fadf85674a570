"""Tensor parallelism by torch's ``parallelize_module``: attention by heads, feedforward layers by columns and rows.

The embedding is cut along the vocabulary, and so are the logits, of which ``loss_parallel`` makes the loss. By torch's
``SequenceParallel``, norms and residuals are split along sequences, too.
"""

from functools import partial
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
from torch.distributed.tensor.parallel.style import ParallelStyle

from pipeproof.wings.primitives.layers import Embedding, Head
from pipeproof.wings.primitives.part import RankPart

Plan = dict[str, ParallelStyle]
COLUMNS = ("attention.queries", "attention.keys", "attention.values", "feedforward.up")
ROWS = ("attention.output", "feedforward.down")


def of_block() -> Plan:
    """Cut a block's weights; other parameters stay whole on every rank."""
    return {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}


def of_split_block() -> Plan:
    """Gather sequences before attention and feedforward layers, and scatter behind."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return {
        **dict.fromkeys(("attention_norm", "norm"), SequenceParallel()),
        **dict.fromkeys(("attention", "feedforward"), gathered),
        **{name: ColwiseParallel() for name in COLUMNS},
        **{name: RowwiseParallel(output_layouts=Shard(1)) for name in ROWS},
    }


def of_head(*, split: bool) -> Plan:
    """Compute logits for this rank's part of the vocabulary; split the norm along sequences."""
    layouts = {"input_layouts": Shard(1)} if split else {}
    output = ColwiseParallel(**layouts, output_layouts=Shard(-1), use_local_output=False)
    return {"norm": SequenceParallel(), "output": output} if split else {"output": output}


def cut(stage: Any, mesh: DeviceMesh, *, split: bool = False) -> nn.Module:
    """Apply the plans to every layer of ``stage``, in place; ``split``: along sequences, too."""
    for layer in stage:
        if isinstance(layer, Embedding):
            plan: Plan = {"tokens": RowwiseParallel(input_layouts=Replicate())}
        elif isinstance(layer, Head):
            plan = of_head(split=split)
        else:
            plan = of_split_block() if split else of_block()
        present = {name: style for name, style in plan.items() if name in dict(layer.named_modules())}
        parallelize_module(layer, mesh, present)
        if split and isinstance(layer, Embedding):
            scattered = PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),))
            parallelize_module(layer, mesh, scattered)
    return stage  # type: ignore[no-any-return]


PARTS = {"tp": RankPart(cut, around=loss_parallel), "sp": RankPart(partial(cut, split=True), around=loss_parallel)}
