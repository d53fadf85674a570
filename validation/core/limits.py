"""Thresholds for the judge, with the measurements behind them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from pipeproof.core.observe.elements import is_rounded


@dataclass(frozen=True)
class Precision:
    """A dtype's rounding and its allowance.

    unit: unit roundoff. factor: floors that count as rounding. least: minimum allowance, used for a zero floor. most:
    maximum allowance, whatever the floor.
    """

    name: Literal["fp32", "TF32", "bf16", "fp16", "fp64"]
    unit: float
    factor: float
    least: float
    most: float


FP32 = Precision("fp32", unit=2.0**-24, factor=16.0, least=32 * 2.0**-24, most=1e-4)
# Eight significant bits allow little: 16 floors would hide a lost microbatch. Other kernels, orders and a wide
# accumulator reached 2.5 floors at most (6 models, 2 to 32 microbatches).
BF16 = Precision("bf16", unit=2.0**-8, factor=4.0, least=4 * 2.0**-8, most=16 * 2.0**-8)
FP16 = replace(BF16, name="fp16", unit=2.0**-11, least=4 * 2.0**-11, most=16 * 2.0**-11)
TF32 = replace(FP16, name="TF32")  # for products alone; fp32 results stay fp32
FP64 = Precision("fp64", unit=2.0**-53, factor=16.0, least=32 * 2.0**-53, most=1e-12)
PRECISIONS: Mapping[torch.dtype, Precision] = MappingProxyType(
    {
        torch.float32: FP32,
        torch.bfloat16: BF16,
        torch.float16: FP16,
        torch.float64: FP64,
        torch.complex64: FP32,
        torch.complex128: FP64,
    }
)
BY_NAME: Mapping[str, Precision] = MappingProxyType({one.name: one for one in (*PRECISIONS.values(), TF32)})

# From 10,198 bf16 gradients (13 models, 2 to 32 microbatches) with sums in other orders and types, no sum led by more
# than 1.5 units and 2.7 times the measured lead.
LEAD = 1.5  # units of rounding: lead allowed to a sum rounded otherwise
LED = 4.0  # times the measured lead: allowed to other orders, or weights one rounding off
# From 6,551 gradients in 570 right bf16 and fp16 steps, most with other kernels, 50 led farther than rounding may; in
# no step did half of them.
SEVERAL = 4  # parameters leading one way: fewer may be chance
FEW = 2  # the same, if one factor explains them
# From 50 right steps beyond their floors, with other kernels, the largest ratio was 1.35.
NUDGED = 1.5  # times the movement under weights one rounding off
DRAWS = 4  # draws per direction: each flips about a third of units near zero
HARDLY = 1e-3  # share of a pure-rounding tensor that survives other rounding
AS_LONG = 2.0  # allowed length ratio for an optimizer step from pure rounding
ALONG = 0.5  # cosine beyond which a step follows the weights, as weight decay does
MANY = 16  # numbers that need more digits: by chance not all of them need fewer
HALF = 0.5  # of a microbatch: largest coefficient error for one share
APART = 1e-6  # of the largest eigenvalue or atom: below it, microbatches look alike


def precision_of(dtype: torch.dtype) -> Precision:
    """Return a dtype's precision. Complex dtypes use their parts'; unknown ones use fp32."""
    return PRECISIONS.get(dtype, FP32)


def coarsest(precisions: Sequence[Precision]) -> Precision:
    """Return the coarsest precision; fp32 by default."""
    return max(precisions, key=lambda one: one.unit, default=FP32)


def precision_among(tensors: Iterable[Tensor]) -> Precision:
    """Return the first rounded tensor's precision."""
    return precision_of(next((one.dtype for one in tensors if is_rounded(one.dtype)), torch.float32))
