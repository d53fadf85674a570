"""Faults of mixed precision: each forgets one convention, follows it twice, or follows it on one rank alone."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from pipeproof.core.cause import Cause
from pipeproof.wings.specimens.catalogue import describe
from pipeproof.wings.specimens.mixed_step import COUNT, WIDTH, MixedPrecision, MixedStep
from pipeproof.wings.specimens.specimen import Fault

FIRST, LAST, RANKS = 0, 1, 2
_LARGE = 1e37  # a number that a loss scale takes beyond fp32


@dataclass(frozen=True)
class MixedCase:
    """A step in one way of mixed precision, correct unless ``step`` changes it."""

    way: MixedPrecision
    step: type[MixedStep] = MixedStep
    name: str = ""
    summary: str = ""
    origin: str = ""
    classes: tuple[str, ...] = ()
    family: str = ""

    @property
    def smallest(self) -> str:
        """The step in a line; it has only one size."""
        return f"by-hand r{RANKS} s{RANKS} m{COUNT} {self.way}"


@dataclass(frozen=True, kw_only=True)
class MixedFault(MixedCase):
    """A fault: the law that must fail and the cause to be named, on one rank or on all.

    Each rank has the stage with its number.
    """

    fault: Fault

    @property
    def cause(self) -> Cause:
        """The cause that a diagnosis should name."""
        return Cause(self.fault.kind, rank=self.fault.rank, stage=self.fault.rank)


class _ScaledTwice(MixedStep):
    def scale(self, loss: Tensor) -> Tensor:
        return super().scale(super().scale(loss))


class _NotScaled(MixedStep):
    def scale(self, loss: Tensor) -> Tensor:
        return loss


class _NotUnscaled(MixedStep):
    def unscale(self) -> None:
        """Skip unscaling."""


class _UnscaledTwice(MixedStep):
    def unscale(self) -> None:
        super().unscale()
        for one in self.gradients.values() if self.rank == LAST else ():
            one.div_(self.scaler.get_scale())


class _ClippedBefore(MixedStep):
    def unscale(self) -> None:
        self.norm = self.norm_of_all()
        self.clip()
        super().unscale()

    def norm_of_all(self) -> float:
        return self.norm or super().norm_of_all()


class _NormBefore(_ClippedBefore):
    def unscale(self) -> None:
        self.norm = self.norm_of_all()
        MixedStep.unscale(self)


class _GrownAlone(MixedStep):
    def first_scale(self) -> float:
        return super().first_scale() * (2.0 if self.rank == FIRST else 1.0)


class _UpdatedEarly(MixedStep):
    def unscale(self) -> None:
        self.scaler.update(2.0 * self.scaler.get_scale())
        super().unscale()


class _SkipsAlone(MixedStep):
    def overflows(self) -> bool:
        return self.rank == LAST or super().overflows()


class _Overflowing(nn.Module):
    """Makes its weight's gradient overflow when the loss is scaled, but passes finite gradients on."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + _LARGE * self.large


class _OverflowSeenAlone(MixedStep):
    def build(self) -> nn.Sequential:
        stage = super().build()
        return stage.append(_Overflowing()) if self.rank == LAST else stage

    def overflows(self) -> bool:
        return not all(bool(one.isfinite().all()) for one in self.gradients.values())


class _AddedInOwnType(MixedStep):
    def empty_sum(self, parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter)


class _RoundedWhole(MixedStep):
    def give_to_optimizer(self) -> None:
        for name, one in self.sums.items() if self.rank == LAST else ():
            self.sums[name] = one.to(self.way.weights).float()
        super().give_to_optimizer()


class _CastForward(MixedStep):
    def send(self, tensor: Tensor, peer: int) -> None:
        super().send(tensor.bfloat16().to(tensor.dtype) if peer > self.rank else tensor, peer)


class _CastBackward(MixedStep):
    def send(self, tensor: Tensor, peer: int) -> None:
        super().send(tensor.bfloat16().to(tensor.dtype) if peer < self.rank else tensor, peer)


class _NotCopiedBack(MixedStep):
    def copy_back(self) -> None:
        if self.rank != FIRST:
            super().copy_back()


class _OtherMasters(MixedStep):
    def master_of(self, parameter: Tensor) -> Tensor:
        master = super().master_of(parameter)
        if self.rank == LAST:
            master.data.mul_(1.25)  # like weights loaded later
        return master


_SCALED = MixedPrecision(scale=1024.0)
_CLIPPED = replace(_SCALED, max_norm=0.1)
_BF16 = MixedPrecision(weights=torch.bfloat16, main_grad=True, masters=True)
_FP16 = replace(_BF16, weights=torch.float16, scale=1024.0)

# Steps that are right: each must pass.
RIGHT = describe(
    {
        "loss-scaled": MixedCase(_SCALED),
        "scaled-and-clipped": MixedCase(_CLIPPED),
        "autocast-bf16": MixedCase(MixedPrecision(autocast=torch.bfloat16)),
        "autocast-fp16": MixedCase(replace(_SCALED, autocast=torch.float16)),
        "pure-bf16": MixedCase(MixedPrecision(weights=torch.bfloat16)),
        "masters": MixedCase(replace(_BF16, main_grad=False)),
        "main-grad": MixedCase(_BF16),
        "fp16": MixedCase(replace(_FP16, max_norm=0.1)),
    }
)
_SCALES = Fault("scale", "gradient")
_OF_THE_LOSS = Fault("scale", "boundaries", rank=LAST)
_CAST = partial(Fault, "rounded", "boundaries")
_SKIPPED, _MOVED = (partial(Fault, kind, "updated-parameters") for kind in ("step-skipped", "update"))
MIXED = describe(
    {
        "loss-scaled-twice": MixedFault(_SCALED, _ScaledTwice, fault=_OF_THE_LOSS),
        "loss-not-scaled": MixedFault(_SCALED, _NotScaled, fault=_OF_THE_LOSS),
        "never-unscaled": MixedFault(_SCALED, _NotUnscaled, fault=_SCALES),
        "unscaled-twice": MixedFault(_SCALED, _UnscaledTwice, fault=replace(_SCALES, rank=LAST)),
        "clipped-before-unscaling": MixedFault(_CLIPPED, _ClippedBefore, fault=_SCALES),
        "norm-before-unscaling": MixedFault(_CLIPPED, _NormBefore, fault=Fault("norm", "grad-norm")),
        "scale-grown-on-one-rank": MixedFault(_SCALED, _GrownAlone, fault=replace(_SCALES, rank=FIRST)),
        "scale-updated-early": MixedFault(_SCALED, _UpdatedEarly, fault=_SCALES),
        "overflow-observed-by-one-rank": MixedFault(_SCALED, _OverflowSeenAlone, fault=_SKIPPED(rank=FIRST)),
        "step-skipped-on-one-rank": MixedFault(_SCALED, _SkipsAlone, fault=_SKIPPED(rank=LAST)),
        "accumulated-in-bf16": MixedFault(_BF16, _AddedInOwnType, fault=Fault("rounded", "gradient")),
        "sum-rounded": MixedFault(_BF16, _RoundedWhole, fault=Fault("rounded", "gradient", rank=LAST)),
        "activations-sent-in-bf16": MixedFault(MixedPrecision(), _CastForward, fault=_CAST(rank=LAST)),
        "gradients-sent-in-bf16": MixedFault(_SCALED, _CastBackward, fault=_CAST(rank=FIRST)),
        "masters-not-copied-back": MixedFault(_BF16, _NotCopiedBack, fault=_MOVED(rank=FIRST)),
        "masters-of-other-weights": MixedFault(_BF16, _OtherMasters, fault=_MOVED(rank=LAST)),
    }
)
