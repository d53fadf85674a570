"""An optimizer whose settings are a little off, as they are where its kernel keeps them in a narrower type."""

from typing import Any

import torch
from torch import Tensor


def settings_off(optimizer: torch.optim.Optimizer, by: float) -> torch.optim.Optimizer:
    """``optimizer``, with every setting that is no whole number smaller by this part of it: rates, betas and others."""
    for group in optimizer.param_groups if by else ():
        group.update({name: _off(value, 1 - by) for name, value in group.items() if name != "params"})
    return optimizer


def _off(value: Any, times: float) -> Any:
    if isinstance(value, tuple):
        return tuple(_off(one, times) for one in value)
    numbers = isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())
    return value * times if numbers else value
