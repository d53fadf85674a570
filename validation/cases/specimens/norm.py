"""Faults of the norm, of clipping and of the update."""

import math
from dataclasses import replace

import torch
from torch import nn

from pipeline.gradients import clip_factor, norm_of
from pipeline.schedule import Schedule
from pipeline.step import Parts, StepResult
from reference.step import Recipe
from validation.cases.specimens.planting import (
    ONE,
    TWO_STAGES,
    Around,
    MovedTwice,
    gradients_of,
    last,
    middle,
    on_work,
    rounded,
)
from validation.cases.specimens.specimen import Fault, Needs, Specimen
from validation.observers.wrappers import AroundGradients, AroundSteps

_MAX_NORM = Recipe().max_norm
_SEVERAL = Needs(stages=2)


def _square(module: nn.Module) -> float:
    """The sum of squares over a stage; tied copies are not told apart, which is right for stages of untied models."""
    return math.fsum(torch.linalg.vector_norm(g, dtype=torch.float64).item() ** 2 for g in gradients_of(module))


class _Placed(Around):
    """Gradient work that knows the middle and the last stage."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.schedule: Schedule = parts.program.schedule
        self.middle, self.last = middle(self.schedule.n_stages), last(self.schedule.n_stages)


class _OnlyLast(_Placed):
    def scale(self, factor: float) -> None:
        for stage in self.stages:
            for gradient in gradients_of(stage.module) if stage.index == self.last else ():
                gradient.mul_(factor)


class _Never(Around):
    def scale(self, factor: float) -> None:
        return None


class _Again(Around):
    def scale(self, factor: float) -> None:
        self.inner.scale(factor)
        self.inner.scale(factor)


class _ByStage(Around):
    """Each stage by the factor of its own norm."""

    def scale(self, factor: float) -> None:
        for stage in self.stages:
            own = clip_factor(norm_of([_square(stage.module)]), _MAX_NORM)
            for gradient in gradients_of(stage.module):
                gradient.mul_(own)


class _ByRank(Around):
    """Each rank by the factor of its own norm, before it hears of the others'."""

    norm = 0.0

    def scale(self, factor: float) -> None:
        self.norm = norm_of(self.inner.squares())
        self.inner.scale(clip_factor(self.norm, _MAX_NORM))


class _OwnNorm(AroundSteps):
    """Each rank reports the norm that it clipped by."""

    def told(self, operation: str, result: StepResult) -> StepResult:
        work = self.parts.gradients
        while isinstance(work, AroundGradients) and not isinstance(work, _ByRank):
            work = work.inner
        return replace(result, grad_norm=work.norm) if isinstance(work, _ByRank) and operation == "train" else result


class _WithoutMiddle(_Placed):
    """The middle stage answers for nothing in the norm."""

    def squares(self) -> list[float]:
        squares = self.inner.squares()
        missing = sum(len(gradients_of(stage.module)) for stage in self.stages if stage.index == self.middle)
        before = sum(len(gradients_of(stage.module)) for stage in self.stages if stage.index < self.middle)
        return squares[:before] + squares[before + missing :]


class _Rounded(Around):
    """Sums of squares in bf16."""

    def squares(self) -> list[float]:
        return rounded(torch.tensor(self.inner.squares(), dtype=torch.float64), torch.bfloat16).tolist()


class _ReportsClipped(AroundSteps):
    """The norm that is reported is the one after clipping."""

    def told(self, operation: str, result: StepResult) -> StepResult:
        norm = result.grad_norm
        return result if norm is None else replace(result, grad_norm=min(norm, _MAX_NORM))


class _Skips(_Placed):
    """One stage finds an infinity of its own, and skips the update that the others make."""

    def scale(self, factor: float) -> None:
        self.inner.scale(factor)
        for stage in self.stages:
            if stage.index == self.middle:
                stage.module.zero_grad(set_to_none=True)


class _UpdatedTwice(MovedTwice):
    """The optimizer moves the middle stage twice."""

    def moved(self) -> list[nn.Parameter]:
        place = middle(self.parts.program.schedule.n_stages)
        return [p for stage in self.parts.stages if stage.index == place for p in stage.module.parameters()]


SPECIMENS = (
    Specimen(
        name="norm-of-rank",
        summary="each rank takes the norm over its own stages, and clips by it",
        origin="pytorch/torchtitan#596; Modalities/modalities#313",
        classes=("tF", "mD"),
        smallest=TWO_STAGES,
        law="grad-norm",
        fault=Fault("norm"),
        needs=Needs(ranks=2),
        plant=on_work(_ByRank),
        drive=_OwnNorm,
    ),
    Specimen(
        name="norm-without-stage",
        summary="the norm leaves out the middle stage",
        origin="deepspeedai/DeepSpeed#1522: stages that differ in their groups of parameters",
        classes=("tF", "mD", "mI"),
        smallest=TWO_STAGES,
        law="grad-norm",
        fault=Fault("norm", stage=middle),
        needs=_SEVERAL,
        plant=on_work(_WithoutMiddle),
    ),
    Specimen(
        name="norm-rounded",
        summary="sums of squares are added in bf16",
        origin="pytorch/torchtitan#4135",
        classes=("tF",),
        smallest=ONE,
        law="grad-norm",
        fault=Fault("norm", alike=("rounded",)),
        plant=on_work(_Rounded),
    ),
    Specimen(
        name="norm-after-clipping",
        summary="the norm that is reported is the one after clipping",
        origin="no report: the class of pytorch/torchtitan#1258, where norm and clipping see different gradients",
        classes=("tF",),
        smallest=ONE,
        law="grad-norm",
        fault=Fault("norm", alike=("report",)),
        drive=_ReportsClipped,
    ),
    Specimen(
        name="clip-last-stage",
        summary="gradients are clipped on the last stage alone",
        origin="pytorch/torchtitan#596, NVIDIA-NeMo/Automodel#3816",
        classes=("tF", "mD"),
        smallest=TWO_STAGES,
        law="updated-parameters",
        fault=Fault("clip"),
        needs=_SEVERAL,
        plant=on_work(_OnlyLast),
    ),
    Specimen(
        name="clip-never",
        summary="the norm uses up the list of parameters, and clipping sees none",
        origin="pytorch/torchtitan#1258",
        classes=("tF",),
        smallest=ONE,
        law="updated-parameters",
        fault=Fault("clip"),
        plant=on_work(_Never),
    ),
    Specimen(
        name="clip-by-stage",
        summary="each stage is clipped by its own norm, though the norm reported is right",
        origin="pytorch/torchtitan#649: one norm for each part of the model",
        classes=("tF", "mD"),
        smallest=TWO_STAGES,
        law="updated-parameters",
        fault=Fault("clip"),
        needs=_SEVERAL,
        plant=on_work(_ByStage),
    ),
    Specimen(
        name="clip-twice",
        summary="gradients are clipped twice by one factor",
        origin="no report: the class of deepspeedai/DeepSpeed#7847, reductions done twice",
        classes=("mD",),
        smallest=ONE,
        law="updated-parameters",
        fault=Fault("clip"),
        plant=on_work(_Again),
    ),
    Specimen(
        name="update-skipped-on-stage",
        summary="one stage decides by itself to skip the update",
        origin="hpcaitech/ColossalAI#80",
        classes=("mD",),
        smallest=ONE,
        law="updated-parameters",
        fault=Fault("update", stage=middle),
        plant=on_work(_Skips),
    ),
    Specimen(
        name="updated-twice",
        summary="the middle stage's parameters are in two groups of the optimizer and are moved twice",
        origin="NVIDIA/Megatron-LM#4641: copies routed to different optimizers",
        classes=("mD",),
        smallest=ONE,
        law="updated-parameters",
        fault=Fault("update", stage=middle),
        drive=_UpdatedTwice,
    ),
)
