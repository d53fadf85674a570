"""Tensor and sequence parallelism by hand, in the manner of Megatron-LM: plain tensors, and functions that communicate.

Between its layers every rank has whole sequences, or with sequence parallelism a part of each. The logits stay in parts
of the vocabulary, and the loss is made of these.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeproof.wings.primitives.collectives import (
    copy_in,
    gather,
    own_part,
    scatter,
    sum_gradients,
    sum_out,
    sum_over,
)
from pipeproof.wings.primitives.context import places
from pipeproof.wings.primitives.layers import Attention, Embedding, Feedforward, Head
from pipeproof.wings.primitives.part import Index, RankPart

Pass = Callable[[Tensor, Any], Tensor]  # into what ranks do with parts of the weights, or out of it


class Cut(nn.Module):
    """A layer with this rank's part of the weights. ``at``: positions in the whole, by parameter name."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, whole: nn.Module, group: Any, across: Pass, *, dims: Mapping[str, int]) -> None:
        super().__init__()
        self.group, self.across = group, across
        self.at: dict[str, Index] = {}
        for name, parameter in whole.named_parameters():
            part = parameter if name not in dims else nn.Parameter(own_part(parameter.data, group, dims[name]).clone())
            self.register_parameter(name, part)
            if name in dims:
                dim, length = dims[name], part.shape[dims[name]]
                before = (slice(0, size) for size in part.shape[:dim])
                self.at[name] = *before, slice(dist.get_rank(group) * length, (dist.get_rank(group) + 1) * length)


class Columns(Cut):
    """A linear layer with a part of outputs: (..., inputs) to (..., outputs / ranks)."""

    def __init__(self, whole: nn.Linear, group: Any, across: Pass) -> None:
        super().__init__(whole, group, across, dims={"weight": 0, "bias": 0})

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's part of outputs."""
        return nn.functional.linear(self.across(x, self.group), self.weight, self._parameters.get("bias"))


class Rows(Cut):
    """A linear layer with a part of inputs: (..., inputs / ranks) to (..., outputs); adds the bias once."""

    def __init__(self, whole: nn.Linear, group: Any, across: Pass) -> None:
        super().__init__(whole, group, across, dims={"weight": 1})

    def forward(self, x: Tensor) -> Tensor:
        """Sum results over all ranks."""
        return with_bias(self.across(nn.functional.linear(x, self.weight), self.group), self.bias)


class Vocabulary(Cut):
    """An embedding for a part of the vocabulary; other tokens give zero."""

    def __init__(self, whole: nn.Embedding, group: Any, across: Pass) -> None:
        super().__init__(whole, group, across, dims={"weight": 0})

    def forward(self, tokens: Tensor) -> Tensor:
        """Sum lookups over all ranks."""
        own, mine = local_index(tokens, len(self.weight), self.group)
        found = nn.functional.embedding(own, self.weight).masked_fill(~mine[..., None], 0)
        return self.across(found, self.group)


def with_bias(x: Tensor, bias: Tensor) -> Tensor:
    """Add a bias, once for all ranks."""
    return x + bias


def local_index(tokens: Tensor, count: int, group: Any) -> tuple[Tensor, Tensor]:
    """Return each token's number among this rank's ``count``, or 0, and whether it is present."""
    own = tokens - dist.get_rank(group) * count
    mine = (own >= 0) & (own < count)
    return own.where(mine, 0), mine


class CrossEntropy(torch.autograd.Function):
    """Cross entropy per token, from logits (tokens, vocabulary / ranks) and targets (tokens)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        """Return each token's loss."""
        own, mine = local_index(target, logits.shape[1], group)
        shifted = logits - largest(logits, group)
        total = sum_over(shifted.exp().sum(1), group)
        wanted = sum_over(shifted.gather(1, own[:, None])[:, 0].masked_fill(~mine, 0), group)
        ctx.save_for_backward(shifted.exp() / total[:, None], own, mine)
        return total.log() - wanted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return probabilities, less one at a target on this rank."""
        chances, own, mine = ctx.saved_tensors
        less = torch.zeros_like(chances).scatter(1, own[:, None], mine[:, None].to(chances.dtype))
        return (chances - less) * gradients[0][:, None], None, None


def largest(logits: Tensor, group: Any) -> Tensor:
    """Return each token's maximum over all ranks' vocabulary, (tokens, 1)."""
    found = logits.max(1, keepdim=True).values
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found


def loss_of_parts(output: Tensor, target: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """Cross entropy over all tokens, (batch, sequence, vocabulary / ranks)."""
    losses = CrossEntropy.apply(output.flatten(0, 1), target.flatten(), mesh.get_group())  # type: ignore[no-untyped-call]
    return losses.mean()  # type: ignore[no-any-return]


CUTS = (  # in which module what is cut how, and whether ranks begin there to have parts
    *((Attention, name, Columns, True) for name in ("queries", "keys", "values")),
    (Attention, "output", Rows, False),
    (Feedforward, "up", Columns, True),
    (Feedforward, "down", Rows, False),
    (Embedding, "tokens", Vocabulary, False),
    (Head, "output", Columns, True),
)


def cut(stage: nn.Module, mesh: DeviceMesh, *, split: bool = False) -> nn.Module:
    """Attention by heads, feedforward layers by columns and rows, embedding and logits by the vocabulary. In place.

    ``split``: between them every rank has a part of each sequence.
    """
    into, out = (gather, scatter) if split else (copy_in, sum_out)
    for module in list(stage.modules()):
        for owner, name, kind, begins in CUTS:
            if isinstance(module, owner):
                setattr(module, name, kind(getattr(module, name), mesh.get_group(), into if begins else out))
        if split and isinstance(module, Embedding):
            module.at = places(mesh)
    return stage


def local_parameters(stage: nn.Module, mesh: DeviceMesh) -> Mapping[nn.Parameter, Index]:
    """Return the positions of parameters that this rank has in part."""
    parts = [
        (module, name, at) for module in stage.modules() if isinstance(module, Cut) for name, at in module.at.items()
    ]
    return {module.get_parameter(name): at for module, name, at in parts}


def of_whole(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Sum gradients of norms, positions and biases: each rank has its part of the sequences."""
    cut_up = local_parameters(stage, mesh)
    sum_gradients(stage, mesh, unless=lambda name, parameter: parameter in cut_up)


_HELD = partial(RankPart, loss=loss_of_parts, held=local_parameters)
PARTS = {"tp-by-hand": _HELD(cut), "sp-by-hand": _HELD(partial(cut, split=True), finish=of_whole)}
