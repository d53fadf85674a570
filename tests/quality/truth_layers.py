"""Models whose layers are unusual and right: streams, views, dictionaries, masks, shared and frozen weights."""

from collections.abc import Callable
from typing import Any

import torch
from runtime_plain import Chain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from truth_models import LAYERS, ROWS, WIDTH, Block, Pairs, loss_fn


def chain(*layers: nn.Module) -> Chain:
    """Layers in a row."""
    return Chain(*layers)


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """``build``, drawn from one seed."""

    def built() -> nn.Module:
        torch.manual_seed(0)
        return build()

    built.__name__ = getattr(build, "__name__", "built")
    return built


class Over(Block):
    """A block that other blocks are made of: ``inner`` maps a tensor to one."""

    def inner(self, x: Tensor) -> Tensor:
        return Block.forward(self, x)


class Carry(Over):
    """Two streams: the second collects what each layer made."""

    def forward(self, given: Any) -> Any:
        x, total = given if isinstance(given, tuple) else (given, given)
        y = self.inner(x)
        return y, total + y


class Aside(Over):
    """One number goes along, to which every layer adds: an auxiliary loss."""

    def forward(self, given: Any) -> Any:
        x, total = given if isinstance(given, tuple) else (given, torch.zeros(()))
        y = self.inner(x)
        return y, total + 0.3 * y.square().mean()


class Residual(Over):
    """What the layer before made is added to the second stream by the next one, as fused norms do it."""

    def forward(self, given: Any) -> Any:
        x, total = given if isinstance(given, tuple) else (given, torch.zeros_like(given))
        total = total + x
        return 0.3 * nn.functional.gelu(self.linear(self.norm(total))), total


class Joined(nn.Module):
    """The end of two streams."""

    def forward(self, given: Any) -> Tensor:
        x, total = given
        made: Tensor = x + 0.5 * total
        return made


class Nested(Over):
    """A stream in a nested tuple, with one that no backward reaches and a number that is no tensor."""

    def forward(self, given: Any) -> Any:
        x = given[0][0] if isinstance(given, tuple) else given
        y = self.inner(x)
        return ((y, y.detach().mean(dim=0)), 7)


class Unnested(nn.Module):
    def forward(self, given: Any) -> Tensor:
        made: Tensor = given[0][0]
        return made


class Named(Over):
    """A dictionary between layers."""

    def forward(self, given: Any) -> Any:
        x = given["hidden"] if isinstance(given, dict) else given
        return {"hidden": self.inner(x), "norm": x.detach().norm()}


class Unnamed(nn.Module):
    def forward(self, given: Any) -> Tensor:
        made: Tensor = given["hidden"]
        return made


class Masked(Over):
    """A mask and positions travel along; no backward reaches them."""

    def forward(self, given: Any) -> Any:
        x, mask, positions = given if isinstance(given, tuple) else self.begun(given)
        return self.inner(x) * mask + 0.01 * positions, mask, positions

    def begun(self, x: Tensor) -> Any:
        return x, x > -1.0, torch.arange(x.shape[-1])


class Unmasked(nn.Module):
    def forward(self, given: Any) -> Tensor:
        made: Tensor = given[0]
        return made


class Transposed(Over):
    """What it makes is a view, and not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.shape[-1] == WIDTH and x.shape[0] == ROWS else x.t()
        return self.inner(x).t()


class Straight(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.t()


class InPlace(nn.Module):
    """A linear layer, and a relu in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.relu(self.linear(x))
        return made


class Twice(nn.Module):
    """One block, applied twice, and one relu that ends both."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.relu = Block(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.relu(self.block(self.relu(self.block(x))))
        return made


class WithBuffers(Block):
    """A mask of bools, indices, and bytes as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(WIDTH) % 5 > 0)
        self.register_buffer("order", torch.arange(WIDTH).flip(0))
        self.register_buffer("bytes", torch.arange(WIDTH, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x) * self.mask + 0.001 * self.bytes[self.order]
        return made


class Recomputed(Block):
    """Checkpoints itself."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant and not x.requires_grad:  # else nothing in it would be differentiated
            x = x.detach().requires_grad_()
        made: Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return made


class RecomputedReentrant(Recomputed):
    reentrant = True


class Unused(Block):
    """Has a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))


class CastsByName(Block):
    """Computes in bf16, whatever its parameters are."""

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(self.norm(x).bfloat16(), self.linear.weight.bfloat16(), self.linear.bias.bfloat16())
        made: Tensor = x + nn.functional.gelu(h.float())
        return made


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


class Writes(nn.Module):
    """A linear layer and a tanh, whose gradients no autograd knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        anchor = torch.zeros((), requires_grad=True)
        made: Tensor = _Writes.apply(x, anchor, self.linear)
        return torch.tanh(made)


class Plainly(nn.Module):
    """The same with a gradient that autograd knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Picture(nn.Module):
    """A convolution, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = nn.functional.gelu(self.conv(x)).contiguous(memory_format=torch.channels_last)
        return made


class Sideways(Block):
    """The first layer of a model with two inputs."""

    def forward(self, x: Tensor, side: Any = None) -> Tensor:
        return super().forward(x if side is None else x + side)


class Attention(nn.Module):
    """Causal attention with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        made: Tensor = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return made


class Targeted(Block):
    """The target goes along with the stream."""

    def forward(self, given: Any, target: Any = None) -> Any:
        x, target = given if target is None else (given, target)
        return super().forward(x), target


class WithLoss(nn.Module):
    """The last layer, which makes the loss."""

    def forward(self, given: Any) -> Tensor:
        return loss_fn(*given)


class Ends(nn.Module):
    """A norm with a bias, of which the sum is taken: nothing before it has a gradient but by rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.constant_(self.norm.bias, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(x)
        return made


class Before(nn.Module):
    """x + gelu(norm(linear(x))), with a norm over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + nn.functional.gelu(self.norm(self.linear(x)))
        return made


def blocks(kind: type[nn.Module] = Block, count: int = LAYERS) -> list[nn.Module]:
    """So many of one kind."""
    return [kind() for _ in range(count)]


def frozen(*numbers: int, biases: bool = False) -> Callable[[], nn.Module]:
    """Blocks, some of which are not trained, or none of whose biases are."""

    def build() -> nn.Module:
        model = chain(*blocks())
        for number in numbers:
            model[number].requires_grad_(False)
        for name, parameter in model.named_parameters():
            if biases and name.endswith("bias"):
                parameter.requires_grad_(False)
        return model

    return build


def of_dtype(dtype: torch.dtype) -> Callable[[], nn.Module]:
    """Blocks of one type."""
    return lambda: chain(*blocks()).to(dtype)


def data_of(
    shape: tuple[int, ...] = (ROWS, WIDTH), *, count: int = 8, dtype: torch.dtype = torch.float32, sides: bool = False
) -> Pairs:
    """Pairs of inputs and target; ``sides``: the inputs are two tensors."""
    draw = torch.Generator().manual_seed(1)

    def one() -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    return [((one(), one()) if sides else one(), one()) for _ in range(count)]


def ragged() -> Pairs:
    """Microbatches of unequal size."""
    draw = torch.Generator().manual_seed(1)
    sizes = [4, 2, 7, 1, 5, 3, 6, 4]
    return [(torch.randn(n, WIDTH, generator=draw), torch.randn(n, WIDTH, generator=draw)) for n in sizes]


def summed(output: Tensor, target: Tensor) -> Tensor:
    """A sum, to be divided by the number of all elements."""
    return loss_fn(output, target) * target.numel()
