"""The thresholds of the judge, and the measurements that they come from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from pipeproof.core.observe.elements import is_rounded


@dataclass(frozen=True)
class Precision:
    """How a dtype rounds, and how much of that is excused.

    unit: its unit roundoff. factor: how many floors are still rounding. least: what a floor measured as zero still
    leaves. most: what no floor, however large, makes a pass.
    """

    name: Literal["fp32", "TF32", "bf16", "fp16", "fp64"]
    unit: float
    factor: float
    least: float
    most: float


FP32 = Precision("fp32", unit=2.0**-24, factor=16.0, least=32 * 2.0**-24, most=1e-4)
# Eight significant bits leave no room to be generous: a lost microbatch is soon as small as 16 floors. Other kernels,
# other orders and a wide accumulator came to 2.5 floors at most (6 models, 2 to 32 microbatches).
BF16 = Precision("bf16", unit=2.0**-8, factor=4.0, least=4 * 2.0**-8, most=16 * 2.0**-8)
FP16 = replace(BF16, name="fp16", unit=2.0**-11, least=4 * 2.0**-11, most=16 * 2.0**-11)
TF32 = replace(FP16, name="TF32")  # of products alone: what is made of fp32 stays in fp32
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

# Of 10,198 gradients in bf16 (13 models, 2 to 32 microbatches) with sums in other orders and types, none led by more
# than 1.5 units and 2.7 times what is measured on the run.
LEAD = 1.5  # units of rounding: as far may a sum lead along what it should be, if it is rounded otherwise
LED = 4.0  # times as far as is measured, a sum in yet another order, or of weights one rounding off, may lead
# Of 6,551 gradients of 570 right steps in bf16 and fp16, most with other kernels, 50 led farther than rounding may; of
# no step half of them did.
SEVERAL = 4  # parameters that lead one way: of fewer it may be chance
FEW = 2  # the same, of those that one factor explains
# Of 50 right steps beyond their floors, with other kernels, one was 1.35 times as far off and none farther.
NUDGED = 1.5  # times as far as weights that are one rounding off move it, it may be off
DRAWS = 4  # of such weights, each way: a unit near zero turns in a third of these, as a rule
HARDLY = 1e-3  # of a tensor that is nothing but rounding, how much is there again if it is rounded otherwise
AS_LONG = 2.0  # times as long, or as short, is a step that some optimizer makes of another rounding
ALONG = 0.5  # the cosine from which on a step leads along the weights, as weight decay does
MANY = 16  # numbers that need more digits: by chance so many sums do not all need fewer
HALF = 0.5  # of a microbatch: what a sum may have too little or too much of one that is there once
APART = 1e-6  # of the largest eigenvalue, or of an atom: what is less is nothing that tells microbatches apart


def precision_of(dtype: torch.dtype) -> Precision:
    """How ``dtype`` rounds, a complex one as its parts do; others than those that are known are judged as fp32."""
    return PRECISIONS.get(dtype, FP32)


def coarsest(precisions: Sequence[Precision]) -> Precision:
    """That of them with the least digits; fp32 of none."""
    return max(precisions, key=lambda one: one.unit, default=FP32)


def precision_among(tensors: Iterable[Tensor]) -> Precision:
    """How the first of ``tensors`` rounds that rounds at all."""
    return precision_of(next((one.dtype for one in tensors if is_rounded(one.dtype)), torch.float32))
