"""Blocks with several or uncommon output tensors: hard cases at pipelines' boundaries.

Legend: B rows, C width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ViewBlock(nn.Module):
    """An MLP block with a view as output: two halves computed separately and read as one row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x_BC: Tensor) -> Tensor:
        out_BC = x_BC + F.gelu(self.linear(self.norm(x_BC)))
        halves = out_BC.view(out_BC.shape[0], 2, -1) * 1.5  # (B, 2, C/2)
        return halves.view(out_BC.shape)


class CarryBlock(nn.Module):
    """Every block reads the model's own input beside the previous block's output, and hands both on."""

    def __init__(self, width: int, *, last: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.last = last

    def forward(self, x_BC: Tensor, *carried_BC: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        first_BC = carried_BC[0] if carried_BC else self.norm(x_BC)
        out_BC = x_BC + F.gelu(self.linear(first_BC * self.norm(x_BC)))
        return out_BC if self.last else (out_BC, first_BC)


class FreshBlock(nn.Module):
    """Hands on a gate for the next block from a parameter alone, not from any input."""

    def __init__(self, width: int, *, last: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.gate = None if last else nn.Parameter(torch.randn(width))

    def forward(self, x_BC: Tensor, *gates_C: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out_BC = F.gelu(self.linear(self.norm(x_BC)))
        out_BC = x_BC + (out_BC * gates_C[0] if gates_C else out_BC)
        return out_BC if self.gate is None else (out_BC, torch.sigmoid(self.gate))


class PromptBlock(nn.Module):
    """Adds a parameter to a stream with the same shape, so that both have equal gradients."""

    def __init__(self, width: int, *, last: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.prompt = nn.Parameter(torch.randn(width))
        self.last = last

    def forward(self, x_BC: Tensor, *prompts_C: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        prompt_C = prompts_C[0] + self.prompt if prompts_C else self.prompt * 2
        out_BC = x_BC + F.gelu(self.linear(self.norm(x_BC) * prompt_C))
        return out_BC if self.last else (out_BC, prompt_C)


class SometimesBlock(nn.Module):
    """Two streams; the second is read only in microbatches with an odd key."""

    def __init__(self, width: int, *, last: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.other = None if last else nn.Linear(width, width)

    def forward(self, a_BC: Tensor, b_BC: Tensor, key: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        read_BC = b_BC if int(key) % 2 else a_BC
        out_BC = a_BC + F.gelu(self.linear(self.norm(read_BC)))
        return out_BC if self.other is None else (out_BC, F.gelu(self.other(a_BC)), key)
