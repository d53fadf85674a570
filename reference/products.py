"""A device's rounding of fp32 products: settings may reduce their digits, as convolutions do by default.

torch has many settings of that, older and newer ones that cannot be asked once both were used, and their effect depends
on the device. So the device itself is asked, with a small product whose fp64 result is known.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

MATRICES, CONVOLUTION = "matrices", "convolution"

_SORTS: Mapping[str, str] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "matmul"), MATRICES),
    **dict.fromkeys(("convolution", "_convolution", "convolution_backward"), CONVOLUTION),
}
_ATTENTION = "scaled_dot_product"  # all of torch's kernels of it, by their names
_SIZE = 64  # rows and columns; smaller ones may go another way
_FP32, _TF32, _BF16 = "fp32", "TF32", "bf16"
_BY_ERROR = ((1e-5, _FP32), (1.2e-3, _TF32))  # TF32 is off by 3e-4, bf16 by 3e-3

# The type of torch that has as many digits.
TYPES: Mapping[str, torch.dtype] = {_FP32: torch.float32, _TF32: torch.float16, _BF16: torch.bfloat16}


def sort_of(func: Any) -> str:
    """Classify products in a torch operator; empty without any."""
    name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
    return _SORTS.get(name, MATRICES if name.startswith(("_" + _ATTENTION, _ATTENTION)) else "")


def sorts_in(model: nn.Module) -> list[str]:
    """List kinds for fp32 products in its modules."""
    if not any(one.dtype is torch.float32 for one in model.parameters()):
        return []
    convolves = any(isinstance(one, _ConvNd) for one in model.modules())
    return [MATRICES, *([CONVOLUTION] if convolves else [])]


def products_in(place: torch.device | str, sorts: Iterable[str]) -> dict[str, str]:
    """Measure rounding in fp32 products by kind at ``place`` now, named by ``TYPES``.

    fp32 if the device cannot be asked.
    """
    return {sort: _measure_rounding(torch.device(place), sort) for sort in sorts}


def _measure_rounding(place: torch.device, sort: str) -> str:
    one, other = _factors()
    try:
        under = torch.autocast(place.type, enabled=False) if torch.is_autocast_enabled(place.type) else nullcontext()
        with torch.no_grad(), under:
            made = _product(one.to(place), other.to(place), sort).cpu().double()
    except Exception:  # no one type: a device may lack an operation
        return _FP32
    expected = _expected(sort)
    off = float((made - expected).norm() / expected.norm())
    return next((name for most, name in _BY_ERROR if off <= most), _BF16)


@cache
def _expected(sort: str) -> Tensor:
    """The product in fp64; like the factors, made once."""
    one, other = _factors()
    return _product(one.double(), other.double(), sort)


def _product(one: Tensor, other: Tensor, sort: str) -> Tensor:
    if sort == MATRICES:
        return one @ other
    return functional.conv2d(one.view(1, _SIZE, 8, 8), other[:, :, None, None])


@cache
def _factors() -> tuple[Tensor, Tensor]:
    """Two matrices with numbers that need all fp32 digits, drawn from a private generator."""
    draw = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, _SIZE, _SIZE, generator=draw, device="cpu", dtype=torch.float32)
    return one, other


def settings_off(optimizer: torch.optim.Optimizer, by: float) -> torch.optim.Optimizer:
    """Shrink every fractional optimizer setting ``by`` a part: rates, betas and others."""
    for group in optimizer.param_groups if by else ():
        group.update({name: _off(value, 1 - by) for name, value in group.items() if name != "params"})
    return optimizer


def _off(value: Any, times: float) -> Any:
    if isinstance(value, tuple):
        return tuple(_off(one, times) for one in value)
    numbers = isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())
    return value * times if numbers else value
