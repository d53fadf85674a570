"""Layers that are unusual and right: streams, views, dictionaries, masks, shared and frozen weights, other types."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from truth_models import ROWS, WIDTH, Block, Build, Chain, blocks, loss_fn, of

TOKENS = 11


class Layer(nn.Module):
    """Parts by name, and a ``function`` of them and of what comes in."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *given: Any) -> Any:
        return self.function(self, *given)


class Altered(Block):
    """A block with another ``function`` in its forward, of itself and of what comes in; ``inner`` is a block's own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def inner(self, x: Tensor) -> Any:
        return Block.forward(self, x)

    def forward(self, *given: Any) -> Any:
        return self.function(self, *given)


class Streams(Altered):
    """What the first layer is given is made by ``start`` of a tensor; each function is of all that goes along."""

    def __init__(self, start: Callable[[Tensor], Any], function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.start = start

    def forward(self, given: Any) -> Any:
        return self.function(self, *(self.start(given) if isinstance(given, Tensor) else given))


def altered(function: Callable[..., Any]) -> Build:
    return partial(Altered, function)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def ends(function: Callable[[Any], Any]) -> Build:
    """A last layer without weights."""
    return lambda: Layer(lambda layer, *given: function(*given))


# Two streams: the second collects what each layer made.
carry = partial(Streams, lambda x: (x, x), lambda block, x, total: (y := block.inner(x), total + y))
# One number goes along, to which every layer adds: an auxiliary loss.
aside = partial(
    Streams,
    lambda x: (x, torch.zeros(())),
    lambda block, x, total: (y := block.inner(x), total + 0.3 * y.square().mean()),
)
# What the layer before made is added to the second stream by the next one, as fused norms do it.
residual = partial(
    Streams,
    lambda x: (x, torch.zeros_like(x)),
    lambda block, x, total: (
        0.3 * nn.functional.gelu(block.linear(block.norm(total := total + x))),
        total,
    ),
)
joined = ends(lambda given: given[0] + 0.5 * given[1])
# A stream in a nested tuple, with one that no backward reaches and a number that is no tensor.
nested = partial(
    Streams, lambda x: ((x,), 7), lambda block, two, seven: ((y := block.inner(two[0]), y.detach().mean(dim=0)), seven)
)
unnested = ends(lambda given: given[0][0])
# A mask and positions travel along; no backward reaches them.
masked = partial(
    Streams,
    lambda x: (x, x > -1.0, torch.arange(x.shape[-1])),
    lambda block, x, mask, positions: (block.inner(x) * mask + 0.01 * positions, mask, positions),
)
first = ends(lambda given: given[0])
# A stream goes through as it is, and another is handed on twice.
beside = partial(
    Streams,
    lambda x: (x, x, x.detach() * 2),
    lambda block, x, same, side: (y := block.inner(0.5 * (x + same)), y, side),
)
ended = ends(lambda given: given[0] + 0.1 * given[2])
# A second output that only people look at, though a gradient could reach it.
looked_at = partial(
    Streams, lambda x: (x, None), lambda block, x, _: (block.inner(x), block.linear.weight.square().sum())
)


@altered
def named(block: Altered, given: Any) -> Any:
    """A dictionary between layers."""
    x = given["hidden"] if isinstance(given, dict) else given
    return {"hidden": block.inner(x), "norm": x.detach().norm()}


unnamed = ends(lambda given: given["hidden"])


@altered
def transposed(block: Altered, x: Tensor) -> Tensor:
    """What it makes is a view, and not contiguous."""
    return block.inner(x if x.shape == (ROWS, WIDTH) else x.t()).t()


straight = ends(lambda x: x.t())


@altered
def targeted(block: Altered, given: Any, target: Any = None) -> Any:
    """The target goes along with the stream."""
    x, target = given if target is None else (given, target)
    return block.inner(x), target


with_loss = ends(lambda given: loss_fn(*given))
# The first layer of a model with two inputs.
sideways = altered(lambda block, x, side=None: block.inner(x if side is None else x + side))
# Changes what it made itself, in place, and its input's clone.
adds_in_place = altered(lambda block, x: block.inner(x.clone().add_(0.25)).mul_(0.5))


@altered
def casts_by_name(block: Altered, x: Tensor) -> Tensor:
    """Computes in bf16, whatever its parameters are."""
    weight, bias = block.linear.weight.bfloat16(), block.linear.bias.bfloat16()
    return x + nn.functional.gelu(nn.functional.linear(block.norm(x).bfloat16(), weight, bias).float())


@altered
def autocast(block: Altered, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return block.inner(x).float()


@altered
def offloads(block: Altered, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return block.inner(x)


def recomputed(*, reentrant: bool) -> Build:
    """Checkpoints itself."""

    def forward(block: Altered, x: Tensor) -> Any:
        if reentrant and not x.requires_grad:  # else nothing in it would be differentiated
            x = x.detach().requires_grad_()
        return checkpoint(block.inner, x, use_reentrant=reentrant)

    return altered(forward)


class StraightThrough(torch.autograd.Function):
    """Rounds, and lets gradients through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


quantised = altered(lambda block, x: StraightThrough.apply(block.inner(x)))


def mixed() -> nn.Module:
    """Its linear layer is in bf16, its norm in fp32."""
    block = Altered(lambda block, x: x + nn.functional.gelu(block.linear(block.norm(x).bfloat16()).float()))
    block.linear.to(torch.bfloat16)
    return block


def with_buffers() -> nn.Module:
    """A mask of bools, indices, and bytes as buffers."""
    block = Altered(lambda block, x: block.inner(x) * block.mask + 0.001 * block.bytes[block.order])
    block.register_buffer("mask", torch.arange(WIDTH) % 5 > 0)
    block.register_buffer("order", torch.arange(WIDTH).flip(0))
    block.register_buffer("bytes", torch.arange(WIDTH, dtype=torch.uint8))
    return block


def scaled() -> nn.Module:
    """Has parameters of one number, of no number, and a complex buffer that turns what comes in."""

    def forward(block: Altered, x: Tensor) -> Any:
        turned = torch.view_as_real(torch.view_as_complex(x.reshape(-1, WIDTH // 2, 2)) * block.turns)
        return block.inner(turned.reshape(x.shape) * block.gamma) + block.empty.sum()

    block = Altered(forward)
    block.gamma, block.empty = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.zeros(0))
    block.register_buffer("turns", torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) / 5))
    return block


def unused() -> nn.Module:
    """Has a parameter that nothing uses."""
    block = Block()
    block.spare = nn.Parameter(torch.ones(3))
    return block


def in_place() -> nn.Module:
    return Layer(lambda layer, x: layer.relu(layer.linear(x)), linear=linear(), relu=nn.ReLU(inplace=True))


def twice() -> nn.Module:
    """One block, applied twice, and one relu that ends both."""
    return Layer(lambda layer, x: layer.relu(layer.block(layer.relu(layer.block(x)))), block=Block(), relu=nn.ReLU())


class _Writes(torch.autograd.Function):
    """x W^T + b; the backward writes the gradients of W and b itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: nn.Linear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return nn.functional.linear(x, layer.weight.detach(), layer.bias.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,), layer = ctx.saved_tensors, ctx.layer
        for parameter, made in ((layer.weight, gradient.t() @ x), (layer.bias, gradient.sum(0))):
            parameter.grad = made if parameter.grad is None else parameter.grad + made
        return gradient @ layer.weight, None, None


def writes(layer: nn.Module | None = None) -> nn.Module:
    """A linear layer and a tanh, whose gradients no autograd knows."""

    def forward(layer: Layer, x: Tensor) -> Tensor:
        return torch.tanh(_Writes.apply(x, torch.zeros((), requires_grad=True), layer.linear))

    return Layer(forward, linear=layer or linear())


def plainly() -> nn.Module:
    """The same with a gradient that autograd knows."""
    return Layer(lambda layer, x: torch.tanh(layer.linear(x)), linear=linear())


def picture() -> nn.Module:
    """A convolution, channels last."""

    def forward(layer: Layer, x: Tensor) -> Tensor:
        return nn.functional.gelu(layer.conv(x)).contiguous(memory_format=torch.channels_last)

    return Layer(forward, conv=nn.Conv2d(3, 3, 3, padding=1))


def attention() -> nn.Module:
    """Causal attention with a residual."""

    def forward(layer: Layer, x: Tensor) -> Tensor:
        q, k, v = layer.qkv(x).chunk(3, dim=-1)
        return x + layer.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))

    return Layer(forward, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=linear())


def recurrent() -> nn.Module:
    return Layer(lambda layer, x: layer.cell(x)[0], cell=nn.GRU(WIDTH, WIDTH, batch_first=True))


def before_norm() -> nn.Module:
    """x + gelu(norm(linear(x))), with a norm over the batch."""
    parts = {"linear": linear(), "norm": nn.BatchNorm1d(WIDTH)}
    return Layer(lambda layer, x: x + nn.functional.gelu(layer.norm(layer.linear(x))), **parts)


def sums_to_nothing() -> nn.Module:
    """A norm with a bias, of which the sum is taken: nothing before it has a gradient but by rounding."""
    layer = Layer(lambda layer, x: layer.norm(x), norm=nn.LayerNorm(WIDTH))
    nn.init.constant_(layer.norm.bias, 0.1)
    return layer


def language(*, sparse: bool) -> Build:
    """An embedding, blocks, and a head."""
    table = partial(nn.Embedding, TOKENS, WIDTH, sparse=sparse)
    tokens = lambda: Layer(lambda layer, ids: layer.table(ids), table=table())  # noqa: E731
    return lambda: Chain(tokens(), *blocks(count=6), nn.Linear(WIDTH, TOKENS))


def one_relu() -> nn.Module:
    """Each layer ends with the relu that the others end with too."""
    relu = nn.ReLU()
    return of(lambda: Layer(lambda layer, x: layer.end(layer.linear(x)), linear=linear(), end=relu))()


def normed() -> nn.Module:
    model = of()()
    for layer in model:
        nn.utils.parametrizations.weight_norm(layer.linear)
    return model


def with_norms() -> nn.Module:
    return nn.Sequential(Block(), nn.BatchNorm1d(WIDTH))


def shared_by_all() -> nn.Module:
    """One block is every layer."""
    one = Block()
    return of(lambda: one)()


def tied(one: int, other: int) -> Build:
    """Two blocks have one weight."""

    def build() -> nn.Module:
        model = of()()
        model[other].linear.weight = model[one].linear.weight
        return model

    return build


def frozen(*numbers: int, biases: bool = False, count: int = 8) -> Build:
    """Blocks, some of which are not trained, or none of whose biases are."""

    def build() -> nn.Module:
        model = of(count=count)()
        for name, parameter in model.named_parameters():
            fixed = int(name.partition(".")[0]) in numbers or (biases and name.endswith("bias"))
            parameter.requires_grad_(not fixed)
        return model

    return build


def of_dtype(dtype: torch.dtype, count: int = 8) -> Build:
    """Blocks of one type."""
    return lambda: of(count=count)().to(dtype)
