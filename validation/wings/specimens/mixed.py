"""Steps in mixed precision, held against themselves link by link: those that are right, and planted faults.

Each fault forgets one convention, follows it twice, or follows it on one rank alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from types import MappingProxyType

import torch
from torch import Tensor, nn

from pipeproof.core.cause import Cause
from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.extensions import extension
from pipeproof.own.faults import SpecimenError
from pipeproof.pipeline.waiting import DEFAULT_TIMEOUT_S
from pipeproof.records.step_check import check_step
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.wings.specimens.catalogue import read_rows
from pipeproof.wings.specimens.mixed_step import (
    COUNT,
    WIDTH,
    MixedPrecision,
    MixedStep,
    loss_fn,
    microbatches_of,
)
from pipeproof.wings.specimens.specimen import Fault
from pipeproof.wings.specimens.trial import Trial, compare_names
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

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
    """A fault: the law that must fail and the cause to be named, on one rank or on all."""

    fault: Fault


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

_STEPS: Mapping[str, tuple[MixedPrecision, type[MixedStep]]] = {
    "loss-scaled": (_SCALED, MixedStep),
    "scaled-and-clipped": (_CLIPPED, MixedStep),
    "autocast-bf16": (MixedPrecision(autocast=torch.bfloat16), MixedStep),
    "autocast-fp16": (replace(_SCALED, autocast=torch.float16), MixedStep),
    "pure-bf16": (MixedPrecision(weights=torch.bfloat16), MixedStep),
    "masters": (replace(_BF16, main_grad=False), MixedStep),
    "main-grad": (_BF16, MixedStep),
    "fp16": (replace(_FP16, max_norm=0.1), MixedStep),
    "loss-scaled-twice": (_SCALED, _ScaledTwice),
    "loss-not-scaled": (_SCALED, _NotScaled),
    "never-unscaled": (_SCALED, _NotUnscaled),
    "unscaled-twice": (_SCALED, _UnscaledTwice),
    "clipped-before-unscaling": (_CLIPPED, _ClippedBefore),
    "norm-before-unscaling": (_CLIPPED, _NormBefore),
    "scale-grown-on-one-rank": (_SCALED, _GrownAlone),
    "scale-updated-early": (_SCALED, _UpdatedEarly),
    "overflow-observed-by-one-rank": (_SCALED, _OverflowSeenAlone),
    "step-skipped-on-one-rank": (_SCALED, _SkipsAlone),
    "accumulated-in-bf16": (_BF16, _AddedInOwnType),
    "sum-rounded": (_BF16, _RoundedWhole),
    "activations-sent-in-bf16": (MixedPrecision(), _CastForward),
    "gradients-sent-in-bf16": (_SCALED, _CastBackward),
    "masters-not-copied-back": (_BF16, _NotCopiedBack),
    "masters-of-other-weights": (_BF16, _OtherMasters),
}
_ROWS = {name: row for name, row in read_rows().items() if name in _STEPS}
MIXED: Mapping[str, MixedFault] = MappingProxyType(
    {name: MixedFault(*_STEPS[name], **row.about, fault=row.fault) for name, row in _ROWS.items() if row.fault}
)
# Steps that are right: each must pass.
RIGHT: Mapping[str, MixedCase] = MappingProxyType(
    {name: MixedCase(*_STEPS[name], **row.about) for name, row in _ROWS.items() if not row.fault}
)


def validate_mixed(case: MixedCase, world: World) -> Verdict:
    """The verdict on the step, run on two of ``world``'s ranks. Raises what a run raises."""
    began = perf_counter()
    verdict: Verdict = world.run(_check_rank, case, ranks=RANKS)[0]
    return replace(verdict, rerun=f"pipeproof mutate --only {case.name}", seconds=perf_counter() - began)


def try_mixed(fault: MixedFault, world: World) -> Trial:
    """Run a step with a fault."""
    return run_mixed(fault, validate_mixed(fault, world))


def run_mixed(fault: MixedFault, verdict: Verdict) -> Trial:
    """Try a fault: is it caught, correctly named, and located? Each rank has the stage with its number.

    One on all ranks is to be reported on all.
    """
    laws = tuple(law.name for law in verdict.laws if law.outcome == "fail")
    ranks = [cause.rank for cause in verdict.causes]
    everywhere = ranks[:1] == [None] or {*ranks} == set(range(RANKS)) if fault.fault.rank is None else len(ranks) == 1
    named = compare_names(Cause(fault.fault.kind, rank=fault.fault.rank, stage=fault.fault.rank), verdict)
    named = replace(named, located=named.located and everywhere, seconds=verdict.seconds)
    return Trial(fault.name, fault.smallest, fault.fault.law, fault.fault.kind, laws, named, None, verdict.seconds)


def _check_rank(context: RankContext, case: MixedCase) -> Verdict:
    """Check one rank's part, with each convention of its way; a job for ``World.run``. Raises ``SpecimenError``."""
    way, microbatches = case.way, microbatches_of(case.way)
    step = case.step(way, context.rank, context.ranks)
    composed = extension("expectations", "composed")
    if composed is None:
        raise SpecimenError(
            "a step by hand is held against itself, link by link, and the wing that does it is not here"
        )
    against: StepExpectation = composed(
        loss_fn,
        optimizer=step.optimizer,
        masters={step.named[name]: master for name, master in step.masters.items()} or None,
        scaler=step.scaler if way.scale else None,
        contract=Contract(accumulation=Accumulation(torch.float32) if way.main_grad else PLAIN, max_norm=way.max_norm),
    )
    check = check_step(step.stage, microbatches, against=against, rename="{}.{}".format, timeout_s=DEFAULT_TIMEOUT_S)
    with check:
        step.run(microbatches, check.gradients)
        check.report(losses=step.losses if step.rank == step.last else None, norm=step.norm)
    return check.verdict
