"""Gradients summed over the ranks that have parts of them."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def reduced(name: str, parameter: nn.Parameter, group: Any) -> None:
    """The gradient of the parameter ``name``, summed over ``group`` in place; of a DTensor what this rank has."""
    if parameter.grad is not None:
        dist.all_reduce(local(parameter.grad), group=group)


def local(gradient: Any) -> Any:
    """What this rank has of ``gradient``."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
