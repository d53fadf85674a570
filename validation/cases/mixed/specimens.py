"""Faults of mixed precision: in each, one convention is forgotten, or followed twice, or on one rank alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from pipeproof.cases.mixed.step import COUNT, WIDTH, MixedPrecision, MixedStep
from pipeproof.cases.specimens.specimen import Fault
from pipeproof.core.cause import Cause

FIRST, LAST, RANKS = 0, 1, 2
_LARGE = 1e37  # a number that a loss scale takes beyond fp32


@dataclass(frozen=True)
class MixedCase:
    """A step that is right, in one way of mixed precision; or not, by what ``step`` does otherwise."""

    summary: str
    way: MixedPrecision
    step: type[MixedStep] = MixedStep
    origin: str = ""
    name: str = ""

    @property
    def smallest(self) -> str:
        """The step in a line; it has no other size."""
        return f"by-hand r{RANKS} s{RANKS} m{COUNT} {self.way}"


@dataclass(frozen=True, kw_only=True)
class MixedFault(MixedCase):
    """A fault: the law that must fail and the cause to be named, on one rank or on all; and the classes that it is of.

    Each rank has the stage of its number.
    """

    fault: Fault
    classes: tuple[str, ...] = ()

    @property
    def cause(self) -> Cause:
        """What a diagnosis should name."""
        return Cause(self.fault.kind, rank=self.fault.rank, stage=self.fault.rank)


class _ScaledTwice(MixedStep):
    def scaled(self, loss: Tensor) -> Tensor:
        return super().scaled(super().scaled(loss))


class _NotScaled(MixedStep):
    def scaled(self, loss: Tensor) -> Tensor:
        return loss


class _NotUnscaled(MixedStep):
    def unscale(self) -> None:
        """Nobody does."""


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
    """Its weight's gradient overflows where the loss is scaled, and what it hands on does not."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + _LARGE * self.large


class _OverflowSeenAlone(MixedStep):
    def built(self) -> nn.Sequential:
        stage = super().built()
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
            master.data.mul_(1.25)  # as of weights that were loaded after it was made
        return master


_SCALED = MixedPrecision(scale=1024.0)
_CLIPPED = replace(_SCALED, max_norm=0.1)
_BF16 = MixedPrecision(weights=torch.bfloat16, main_grad=True, masters=True)
_FP16 = replace(_BF16, weights=torch.float16, scale=1024.0)

# Steps that are right: each must pass.
_RIGHT: Mapping[str, MixedCase] = MappingProxyType(
    {
        "loss-scaled": MixedCase("losses are scaled, and gradients unscaled", _SCALED),
        "scaled-and-clipped": MixedCase("and then clipped", _CLIPPED),
        "autocast-bf16": MixedCase("modules compute in bf16", MixedPrecision(autocast=torch.bfloat16)),
        "autocast-fp16": MixedCase("modules compute in fp16", replace(_SCALED, autocast=torch.float16)),
        "pure-bf16": MixedCase("all is in bf16", MixedPrecision(weights=torch.bfloat16)),
        "masters": MixedCase("sums in bf16, masters in fp32", replace(_BF16, main_grad=False)),
        "main-grad": MixedCase("sums and masters in fp32", _BF16),
        "fp16": MixedCase("fp16, losses are scaled, sums and masters in fp32", replace(_FP16, max_norm=0.1)),
    }
)
_FAULTS: Mapping[str, MixedFault] = MappingProxyType(
    {
        "loss-scaled-twice": MixedFault(
            "the loss is scaled by its caller, and again by what wraps its backward",
            _SCALED,
            _ScaledTwice,
            "no report: the class of NVIDIA/Megatron-LM#3159, losses normalised in two places",
            fault=Fault("scale", "boundaries", rank=LAST),
            classes=("mA",),
        ),
        "loss-not-scaled": MixedFault(
            "the loss is not scaled, and gradients are divided by the scale all the same",
            _SCALED,
            _NotScaled,
            "hpcaitech/ColossalAI, zbv in fp16 (see the guide on ColossalAI)",
            fault=Fault("scale", "boundaries", rank=LAST),
            classes=("mA",),
        ),
        "never-unscaled": MixedFault(
            "nobody divides gradients by the loss scale",
            _SCALED,
            _NotUnscaled,
            "no report: what torch.amp's documentation warns of",
            fault=Fault("scale", "gradient"),
            classes=("mA",),
        ),
        "unscaled-twice": MixedFault(
            "one rank divides its gradients by the loss scale twice",
            _SCALED,
            _UnscaledTwice,
            "no report: what GradScaler.unscale_ raises for",
            fault=Fault("scale", "gradient", rank=LAST),
            classes=("mA",),
        ),
        "clipped-before-unscaling": MixedFault(
            "gradients are clipped while they are scaled, and unscaled then",
            _CLIPPED,
            _ClippedBefore,
            "no report: what torch.amp's documentation warns of",
            fault=Fault("scale", "gradient"),
            classes=("mD",),
        ),
        "norm-before-unscaling": MixedFault(
            "the norm is taken before gradients are unscaled, and they are clipped by it afterwards",
            _CLIPPED,
            _NormBefore,
            "no report: what torch.amp's documentation warns of",
            fault=Fault("norm", "grad-norm"),
            classes=("mD",),
        ),
        "scale-grown-on-one-rank": MixedFault(
            "overflows are counted on each rank by itself, so that one rank's loss scale has grown",
            _SCALED,
            _GrownAlone,
            "no report: the class of hpcaitech/ColossalAI#80, ranks that decide by themselves",
            fault=Fault("scale", "gradient", rank=FIRST),
            classes=("mD", "mL"),
        ),
        "scale-updated-early": MixedFault(
            "the loss scale is updated before gradients are divided by it",
            _SCALED,
            _UpdatedEarly,
            "no report: the order that torch.amp's documentation asks for",
            fault=Fault("scale", "gradient"),
            classes=("mD", "mL"),
        ),
        "overflow-seen-by-one-rank": MixedFault(
            "gradients overflow on one rank, which skips its step, and the others take theirs",
            _SCALED,
            _OverflowSeenAlone,
            "hpcaitech/ColossalAI#80",
            fault=Fault("step-skipped", "updated-parameters", rank=FIRST),
            classes=("mD",),
        ),
        "step-skipped-on-one-rank": MixedFault(
            "one rank takes its gradients to overflow that do not, and skips its step",
            _SCALED,
            _SkipsAlone,
            "hpcaitech/ColossalAI#80",
            fault=Fault("step-skipped", "updated-parameters", rank=LAST),
            classes=("mD",),
        ),
        "accumulated-in-bf16": MixedFault(
            "gradients of microbatches are added up in the type of the weights, and made fp32 then",
            _BF16,
            _AddedInOwnType,
            "the class of NVIDIA/Megatron-LM's accumulate_allreduce_grads_in_fp32, where it is left off",
            fault=Fault("rounded", "gradient"),
            classes=("mB", "mE"),
        ),
        "sum-rounded": MixedFault(
            "one rank's complete sums are made bf16 before they are fp32 again",
            _BF16,
            _RoundedWhole,
            "the class of hpcaitech/ColossalAI#79: two sides that assume different types",
            fault=Fault("rounded", "gradient", rank=LAST),
            classes=("mF",),
        ),
        "activations-sent-in-bf16": MixedFault(
            "activations are sent in bf16 between stages that compute in fp32",
            MixedPrecision(),
            _CastForward,
            "the class of hpcaitech/ColossalAI#79: two sides that assume different types",
            fault=Fault("rounded", "boundaries", rank=LAST),
            classes=("mF",),
        ),
        "gradients-sent-in-bf16": MixedFault(
            "gradients are sent back in bf16 between stages that compute in fp32",
            _SCALED,
            _CastBackward,
            "the class of hpcaitech/ColossalAI#79: two sides that assume different types",
            fault=Fault("rounded", "boundaries", rank=FIRST),
            classes=("mF",),
        ),
        "masters-not-copied-back": MixedFault(
            "one rank moves its master copies, and leaves the weights as they were",
            _BF16,
            _NotCopiedBack,
            "no report: the class of NVIDIA/Megatron-LM#4641, copies routed to different optimizers",
            fault=Fault("update", "updated-parameters", rank=FIRST),
            classes=("mD",),
        ),
        "masters-of-other-weights": MixedFault(
            "one rank's master copies were made before the weights were loaded",
            _BF16,
            _OtherMasters,
            "no report: the class of weights that are loaded and not copied to the optimizer's",
            fault=Fault("update", "updated-parameters", rank=LAST),
            classes=("mL", "tJ"),
        ),
    }
)
RIGHT: Mapping[str, MixedCase] = MappingProxyType({name: replace(one, name=name) for name, one in _RIGHT.items()})
MIXED: Mapping[str, MixedFault] = MappingProxyType({name: replace(one, name=name) for name, one in _FAULTS.items()})
