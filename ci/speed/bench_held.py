"""Part e: the memory that a split backward holds between its halves, ours and torch's, on the same modules.

What is held is counted, not sampled: the profiler's record of every allocation and release on the CPU from before the
forward until after I, added up. The parameters, the stage's input and what arrives at its output exist before and are
not in it; the input's gradient and the output are let go before the count ends, as a runtime lets them go.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from bench_table import Row, Target
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input

from pipeproof.own.timed_step import allocations
from pipeproof.pipeline.stage import ModuleStage


class Block(nn.Module):
    """A transformer block. Legend: B batch, T tokens, D width, H heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = [z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.qkv(self.before(x)).chunk(3, -1)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)  # (B, H, T, D/H)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Example(NamedTuple):
    """A stage to measure, and the shape of its input."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


EXAMPLES = {
    "mlp, 4 layers of 1024": Example(
        lambda: nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(1024, 1024), nn.GELU()))), (512, 1024)
    ),
    "transformer block": Example(lambda: Block(512, 8), (4, 256, 512)),
    "2 transformer blocks": Example(lambda: nn.Sequential(Block(512, 8), Block(512, 8)), (4, 256, 512)),
}


def measure(*, ranks: int, rounds: int) -> list[Row]:
    """Megabytes held after F, and after I: ours and torch's. No ranks take part, and a count needs no second round."""
    del ranks, rounds
    return [_row(name, *kind) for name, kind in EXAMPLES.items()]


def _row(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Row:
    module = make()
    held = {what: held_bytes(step, module, shape) / 1e6 for what, step in STEPS.items()}
    target = Target("ours/torch", held["ours"] / held["torch"], 1.0)
    return Row(name, held, [target], f"ours/after F {held['ours'] / held['after F']:.3f}; input {shape}, fp32")


def held_bytes(step: Callable[[nn.Module, Tensor, Tensor], object], module: nn.Module, shape: tuple[int, ...]) -> int:
    """How many bytes more are allocated after ``step(module, input, gradient of the output)``, what it returns kept."""
    x, gradient = torch.randn(shape, requires_grad=True), torch.randn(shape)
    kept = step(module, x, gradient)  # what is allocated once and for all is not what is held
    x.grad = None
    del kept
    with allocations() as found:
        kept = step(module, x, gradient)
        x.grad = None  # torch adds the input's gradient there
    del kept
    return found.net


def _after_forward(module: nn.Module, x: Tensor, gradient: Tensor) -> object:
    return module(x)


def _ours(module: nn.Module, x: Tensor, gradient: Tensor) -> object:
    stage = ModuleStage(module, 1, splits=True)
    stage.forward(0, (x,), None)
    stage.backward_input(0, (gradient,))
    assert not stage.undeferred, f"weights' gradients that came early are held too: {stage.undeferred}"
    return stage


def _torchs(module: nn.Module, x: Tensor, gradient: Tensor) -> object:
    output = module(x)
    _, groups = stage_backward_input([output], [gradient], [x], module.parameters())
    return groups


STEPS = {"after F": _after_forward, "ours": _ours, "torch": _torchs}
