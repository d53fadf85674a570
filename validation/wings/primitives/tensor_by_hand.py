"""Tensor and sequence parallelism by hand, in the manner of Megatron-LM: plain tensors, and functions that communicate.

Between its layers every rank has whole sequences, or with sequence parallelism a part of each. The logits stay in parts
of the vocabulary, and the loss is made of these.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeproof.wings.primitives.collectives import copied, gathered, own_part, reduced, scattered, summed, summed_over
from pipeproof.wings.primitives.context import places
from pipeproof.wings.primitives.layers import Attention, Embedding, Feedforward, Head
from pipeproof.wings.primitives.part import Index, RankPart

Pass = Callable[[Tensor, Any], Tensor]  # into what ranks do with parts of the weights, or out of it


class Cut(nn.Module):
    """A layer with this rank's part of the weights. ``at``: where these lie in the whole, by the parameter's name."""

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
                self.at[name] = index(part, dims[name], dist.get_rank(group))


class Columns(Cut):
    """A linear layer that has some of the outputs, (..., inputs) to (..., outputs / ranks)."""

    def __init__(self, whole: nn.Linear, group: Any, across: Pass) -> None:
        super().__init__(whole, group, across, dims={"weight": 0, "bias": 0})

    def forward(self, x: Tensor) -> Tensor:
        """Its part of the outputs."""
        return nn.functional.linear(self.across(x, self.group), self.weight, self._parameters.get("bias"))


class Rows(Cut):
    """A linear layer that takes some of the inputs, (..., inputs / ranks) to (..., outputs); the bias is added once."""

    def __init__(self, whole: nn.Linear, group: Any, across: Pass) -> None:
        super().__init__(whole, group, across, dims={"weight": 1})

    def forward(self, x: Tensor) -> Tensor:
        """The sum of what all ranks make."""
        return with_bias(self.across(nn.functional.linear(x, self.weight), self.group), self.bias)


class Vocabulary(Cut):
    """An embedding of some of the tokens: those of other ranks are zero here."""

    def __init__(self, whole: nn.Embedding, group: Any, across: Pass) -> None:
        super().__init__(whole, group, across, dims={"weight": 0})

    def forward(self, tokens: Tensor) -> Tensor:
        """The sum of what all ranks look up."""
        own, mine = within(tokens, len(self.weight), self.group)
        found = nn.functional.embedding(own, self.weight).masked_fill(~mine[..., None], 0)
        return self.across(found, self.group)


def index(part: Tensor, dim: int, rank: int) -> Index:
    """Where ``part`` lies in the whole: ranks have equal parts along ``dim``."""
    length = part.shape[dim]
    return *(slice(0, size) for size in part.shape[:dim]), slice(rank * length, (rank + 1) * length)


def with_bias(x: Tensor, bias: Tensor) -> Tensor:
    """``x``, with what is added once for all ranks."""
    return x + bias


def within(tokens: Tensor, count: int, group: Any) -> tuple[Tensor, Tensor]:
    """The number among this rank's ``count`` of every token, and whether it is one; 0 where it is none."""
    own = tokens - dist.get_rank(group) * count
    mine = (own >= 0) & (own < count)
    return own.where(mine, 0), mine


class CrossEntropy(torch.autograd.Function):
    """Of each token, of logits (tokens, vocabulary / ranks) and targets (tokens)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        """The loss of each token."""
        own, mine = within(target, logits.shape[1], group)
        shifted = logits - largest(logits, group)
        total = summed_over(shifted.exp().sum(1), group)
        wanted = summed_over(shifted.gather(1, own[:, None])[:, 0].masked_fill(~mine, 0), group)
        ctx.save_for_backward(shifted.exp() / total[:, None], own, mine)
        return total.log() - wanted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The chances, less one for the target where that is this rank's."""
        chances, own, mine = ctx.saved_tensors
        less = torch.zeros_like(chances).scatter(1, own[:, None], mine[:, None].to(chances.dtype))
        return (chances - less) * gradients[0][:, None], None, None


def largest(logits: Tensor, group: Any) -> Tensor:
    """Of each token, over the vocabulary of all ranks, (tokens, 1)."""
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


def cut(stage: nn.Module, mesh: DeviceMesh, *, into: Pass, out: Pass) -> nn.Module:
    """Attention by heads, feedforward layers by columns and rows, embedding and logits by the vocabulary. In place."""
    for module in list(stage.modules()):
        for owner, name, kind, begins in CUTS:
            if isinstance(module, owner):
                setattr(module, name, kind(getattr(module, name), mesh.get_group(), into if begins else out))
    return stage


def cut_whole(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Every rank has whole sequences between the layers."""
    return cut(stage, mesh, into=copied, out=summed)


def cut_sequences(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Every rank has a part of each sequence between the layers."""
    for module in cut(stage, mesh, into=gathered, out=scattered).modules():
        if isinstance(module, Embedding):
            module.at = places(mesh)
    return stage


def held(stage: nn.Module, mesh: DeviceMesh) -> Mapping[nn.Parameter, Index]:
    """Where the parameters lie of which this rank has a part."""
    parts = [
        (module, name, at) for module in stage.modules() if isinstance(module, Cut) for name, at in module.at.items()
    ]
    return {module.get_parameter(name): at for module, name, at in parts}


def of_whole(stage: nn.Module, mesh: DeviceMesh) -> None:
    """The gradients of norms, positions and biases added once: each rank has those of its part of the sequences."""
    cut_up = held(stage, mesh)
    for name, parameter in stage.named_parameters():
        if parameter not in cut_up:
            reduced(name, parameter, mesh.get_group())


TENSOR_BY_HAND = RankPart(cut_whole, loss=loss_of_parts, held=held)
SEQUENCE_BY_HAND = RankPart(cut_sequences, loss=loss_of_parts, held=held, finish=of_whole)
