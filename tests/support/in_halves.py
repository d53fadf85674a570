"""A small model, and another kernel than its own, which rounds otherwise."""

import torch
from torch import Tensor, nn


class InHalves(nn.Linear):
    """A kernel that adds up two halves of each sum, each rounded."""

    def forward(self, x: Tensor) -> Tensor:
        half = self.in_features // 2
        return x[:, :half] @ self.weight[:, :half].T + x[:, half:] @ self.weight[:, half:].T + self.bias


def build(layer: type[nn.Linear] = nn.Linear) -> nn.Module:
    """Three layers of width 32, each with its GELU, the same every time."""
    torch.manual_seed(8)
    return nn.Sequential(*(nn.Sequential(layer(32, 32), nn.GELU()) for _ in range(3)))
