"""Single-device models, all in this file, in the manner of nanoGPT (Karpathy, github.com/karpathy/nanoGPT).

A model is a chain of pieces; each takes and returns a tensor or a tuple of tensors. ``layers`` says which pieces belong
to which layer, the unit in which a pipeline is cut: the embedding goes with the first layer, the head with the last.

Legend: B rows, T tokens, C width, H heads, K vocabulary, L layers.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32
HEADS = 4
VOCABULARY = 128  # ASCII
CONTEXT = 64

# What weights, activations and gradients are made of.
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
)

LossFn = Callable[[Tensor, Tensor], Tensor]


class ModelError(ValueError):
    """An unknown model, or an impossible size."""


class Model(nn.Module):
    """A chain: named pieces, with losses for its output.

    ``layers[i]`` names the pieces of layer i, as submodules of this module. ``mean_loss`` is the mean over a
    microbatch's targets, ``sum_loss`` their sum.
    """

    def __init__(self, layers: Sequence[Sequence[str]], *, mean_loss: LossFn, sum_loss: LossFn) -> None:
        super().__init__()
        self.layers = tuple(tuple(pieces) for pieces in layers)
        self.mean_loss = mean_loss
        self.sum_loss = sum_loss

    def forward(self, *inputs: Tensor) -> Tensor:
        (output,) = self.through(range(len(self.layers)), inputs)
        return output

    def through(self, layers: Iterable[int], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run some ``layers`` alone."""
        for piece in (piece for layer in layers for piece in self.layers[layer]):
            outputs = self.get_submodule(piece)(*inputs)
            inputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return inputs


class Block(nn.Module):
    """A layer's parts: a norm, and a linear map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def mlp(self, x_BC: Tensor) -> Tensor:
        """gelu(linear(norm(x)))."""
        return F.gelu(self.linear(self.norm(x_BC)))


class MLPBlock(Block):
    """x + gelu(linear(norm(x)))."""

    def forward(self, x_BC: Tensor) -> Tensor:
        return x_BC + self.mlp(x_BC)


class TwiceBlock(Block):
    """One weight used twice on a path: x + gelu(gelu(x W) W)."""

    def forward(self, x_BC: Tensor) -> Tensor:
        return x_BC + F.gelu(self.linear(self.mlp(x_BC)))


class ViewBlock(Block):
    """A view as output: two halves computed separately and read as one row."""

    def forward(self, x_BC: Tensor) -> Tensor:
        out_BC = x_BC + self.mlp(x_BC)
        halves = out_BC.view(out_BC.shape[0], 2, -1) * 1.5  # (B, 2, C/2)
        return halves.view(out_BC.shape)


class DropoutBlock(nn.Module):
    """An MLP block with dropout by a mask from (seed, layer, key), independent of earlier draws.

    ``key`` is an integer that travels with the microbatch, so a pipeline and a single device draw the same mask, in any
    order and also when a forward is computed again.
    """

    def __init__(self, width: int, *, layer: int, seed: int, last: bool) -> None:
        super().__init__()
        self.block = MLPBlock(width)
        self.rate = 0.25
        self.layer, self.seed, self.last = layer, seed, last

    def forward(self, x_BC: Tensor, key: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y_BC = self.block(x_BC)
        if self.training:
            generator = torch.Generator().manual_seed((self.seed * 1009 + self.layer) * 1_000_003 + int(key))
            kept_BC = torch.rand(y_BC.shape, generator=generator) >= self.rate
            y_BC = y_BC * kept_BC.to(y_BC) / (1 - self.rate)
        return y_BC if self.last else (y_BC, key)


class BatchNormBlock(MLPBlock):
    """An MLP block with batch statistics: buffers that training updates, and evaluation reads in their place."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)


class StreamBlock(Block):
    """A block that hands on several tensors, unless it is the last."""

    def __init__(self, width: int, *, last: bool) -> None:
        super().__init__(width)
        self.last = last


class PairBlock(StreamBlock):
    """Two streams of activations: a, b -> a + linear(b), gelu(other(a)).

    The last block drops b, so its ``other`` is never used and its gradients stay None.
    """

    def __init__(self, width: int, *, last: bool) -> None:
        super().__init__(width, last=last)
        self.other = nn.Linear(width, width)

    def forward(self, a_BC: Tensor, b_BC: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out_BC = a_BC + self.linear(self.norm(b_BC))
        return out_BC if self.last else (out_BC, b_BC + F.gelu(self.other(a_BC)))


class CarryBlock(StreamBlock):
    """Every block reads the model's own input beside the previous block's output, and hands both on."""

    def forward(self, x_BC: Tensor, *carried_BC: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        first_BC = carried_BC[0] if carried_BC else self.norm(x_BC)
        out_BC = x_BC + F.gelu(self.linear(first_BC * self.norm(x_BC)))
        return out_BC if self.last else (out_BC, first_BC)


class FreshBlock(StreamBlock):
    """Hands on a gate for the next block from a parameter alone, not from any input."""

    def __init__(self, width: int, *, last: bool) -> None:
        super().__init__(width, last=last)
        self.gate = None if last else nn.Parameter(torch.randn(width))

    def forward(self, x_BC: Tensor, *gates_C: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out_BC = self.mlp(x_BC)
        out_BC = x_BC + (out_BC * gates_C[0] if gates_C else out_BC)
        return out_BC if self.gate is None else (out_BC, torch.sigmoid(self.gate))


class PromptBlock(StreamBlock):
    """Adds a parameter to a stream with the same shape, so that both have equal gradients."""

    def __init__(self, width: int, *, last: bool) -> None:
        super().__init__(width, last=last)
        self.prompt = nn.Parameter(torch.randn(width))

    def forward(self, x_BC: Tensor, *prompts_C: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        prompt_C = prompts_C[0] + self.prompt if prompts_C else self.prompt * 2
        out_BC = x_BC + F.gelu(self.linear(self.norm(x_BC) * prompt_C))
        return out_BC if self.last else (out_BC, prompt_C)


class SometimesBlock(StreamBlock):
    """Two streams; the second is read only in microbatches with an odd key."""

    def __init__(self, width: int, *, last: bool) -> None:
        super().__init__(width, last=last)
        self.other = None if last else nn.Linear(width, width)

    def forward(self, a_BC: Tensor, b_BC: Tensor, key: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        out_BC = a_BC + self.mlp(b_BC if int(key) % 2 else a_BC)
        return out_BC if self.other is None else (out_BC, F.gelu(self.other(a_BC)), key)


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC: Tensor = self.token(tokens_BT) + self.position(positions_T)
        return x_BTC


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        b, t, c = x_BTC.shape
        parts_BTC = self.qkv(x_BTC).chunk(3, dim=-1)
        query, key, value = (part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in parts_BTC)  # (B, H, T, C/H)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y_BTC: Tensor = self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return y_BTC


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm_1(x_BTC))
        y_BTC: Tensor = x_BTC + self.down(F.gelu(self.up(self.norm_2(x_BTC))))
        return y_BTC


class Head(nn.Module):
    """Final norm, and logits over the vocabulary."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        logits_BTK: Tensor = self.logits(self.norm(x_BTC))
        return logits_BTK


def _full(output: Tensor) -> Tensor:
    """``output`` in fp32 at least: a loss with eight significant bits would say nothing."""
    return output.to(torch.promote_types(output.dtype, torch.float32))


def token_loss(reduction: str) -> LossFn:
    """Cross entropy for next tokens; -100 targets count for nothing."""

    def loss(logits_BTK: Tensor, targets_BT: Tensor) -> Tensor:
        return F.cross_entropy(_full(logits_BTK).flatten(0, 1), targets_BT.flatten(), reduction=reduction)

    return loss


def square_loss(reduction: str) -> LossFn:
    """Squared error, with a row as a target."""

    def loss(output_BC: Tensor, target_BC: Tensor) -> Tensor:
        rows_B = (_full(output_BC) - _full(target_BC)).square().mean(dim=-1)
        return rows_B.mean() if reduction == "mean" else rows_B.sum()

    return loss


class GPT(Model):
    """A small GPT. With ``tied`` the head's weight is the token embedding's, one parameter under two names."""

    def __init__(self, layers: int, *, tied: bool, width: int = WIDTH) -> None:
        pieces = [[f"blocks.{layer}"] for layer in range(layers)]
        pieces[0].insert(0, "embed")
        pieces[-1].append("head")
        super().__init__(pieces, mean_loss=token_loss("mean"), sum_loss=token_loss("sum"))
        self.embed = Embedding(width)
        self.blocks = nn.ModuleList(TransformerBlock(width) for _ in range(layers))
        self.head = Head(width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 * math.sqrt(768 / width))
        if tied:
            self.head.logits.weight = self.embed.token.weight


class Stack(Model):
    """Equal blocks on rows of width C, trained to match given rows."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        pieces = [[f"blocks.{layer}"] for layer in range(len(blocks))]
        super().__init__(pieces, mean_loss=square_loss("mean"), sum_loss=square_loss("sum"))
        self.blocks = nn.ModuleList(blocks)


def _stack(block: Callable[[int], nn.Module]) -> Callable[[int, int], Model]:
    return lambda layers, seed: Stack([block(WIDTH) for _ in range(layers)])


def _frozen(layers: int, seed: int) -> Model:
    model = Stack([MLPBlock(WIDTH) for _ in range(layers)])
    model.get_parameter(f"blocks.{layers // 2}.linear.weight").requires_grad_(False)
    return model


def _dropout(layers: int, seed: int) -> Model:
    return Stack([DropoutBlock(WIDTH, layer=k, seed=seed, last=k == layers - 1) for k in range(layers)])


def _stream(block: Callable[..., nn.Module]) -> Callable[[int, int], Model]:
    """A model with blocks that know the last: it hands on a single tensor."""
    return lambda layers, seed: Stack([block(WIDTH, last=k == layers - 1) for k in range(layers)])


MODELS: Mapping[str, Callable[[int, int], Model]] = MappingProxyType(
    {
        "gpt": lambda layers, seed: GPT(layers, tied=False),
        "gpt-tied": lambda layers, seed: GPT(layers, tied=True),
        "mlp": _stack(MLPBlock),
        "twice": _stack(TwiceBlock),
        "frozen": _frozen,
        "batchnorm": _stack(BatchNormBlock),
        "dropout": _dropout,
        "pair": _stream(PairBlock),
        "view": _stack(ViewBlock),
        "carry": _stream(CarryBlock),
        "fresh": _stream(FreshBlock),
        "prompt": _stream(PromptBlock),
        "sometimes": _stream(SometimesBlock),
    }
)


def build_model(name: str, *, layers: int, seed: int, dtype: str = "fp32") -> Model:
    """Build the model ``name`` with ``layers`` layers and weights from ``seed``, equal on every rank, on the CPU.

    ``dtype``: one of ``DTYPES``; weights are always drawn in fp32.
    """
    if name not in MODELS:
        raise ModelError(f"unknown model {name!r}: known are {', '.join(MODELS)}")
    if layers < 1:
        raise ModelError(f"layers is {layers}: expected at least 1")
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}: known are {', '.join(DTYPES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](layers, seed).to(DTYPES[dtype])
