"""Faults of the norm, of clipping and of the update."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeproof.cases.specimens.planting import (
    gradients_of,
    last,
    middle,
    moved_twice,
    on_gradients,
    on_steps,
    on_work,
    rounded,
    scaled,
    stages_at,
)
from pipeproof.cases.specimens.specimen import Fault, Needs, Specimen
from pipeproof.pipeline.gradients import clip_factor, norm_of
from pipeproof.pipeline.step import Parts, StepResult
from pipeproof.reference.step import Recipe

_MAX_NORM = Recipe().max_norm
_SEVERAL = Needs(stages=2)
_CLIP = Fault("clip", "updated-parameters")


def square(gradient: Tensor) -> float:
    """The sum of squares of one gradient."""
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64).item() ** 2)


_norms: dict[int, float] = {}  # by rank: what it clipped by


def _clipped_by_rank(factor: float, parts: Parts) -> None:
    """Each rank clips by its own norm, before it hears of the others'."""
    norm = _norms[parts.transport.rank] = norm_of(parts.gradients.squares())
    parts.gradients.scale(clip_factor(norm, _MAX_NORM))


def _norm_of_rank(result: StepResult, parts: Parts) -> StepResult:
    return replace(result, grad_norm=_norms[parts.transport.rank])


def _without_middle(squares: list[float], parts: Parts) -> list[float]:
    at = middle(parts.program.schedule.n_stages)
    before = sum(len(gradients_of(stage.module)) for stage in parts.stages if stage.index < at)
    missing = sum(len(gradients_of(stage.module)) for stage in stages_at(parts, middle))
    return squares[:before] + squares[before + missing :]


def _in_bf16(squares: list[float], parts: Parts) -> list[float]:
    return rounded(torch.tensor(squares, dtype=torch.float64), torch.bfloat16).tolist()


def _after_clipping(result: StepResult, parts: Parts) -> StepResult:
    return result if result.grad_norm is None else replace(result, grad_norm=min(result.grad_norm, _MAX_NORM))


def _last_alone(factor: float, parts: Parts) -> None:
    for stage in stages_at(parts, last):
        scaled(factor)(stage.module)


def _by_stage(factor: float, parts: Parts) -> None:
    """Each stage by the factor of its own norm; tied copies are not told apart."""
    for stage in parts.stages:
        own = norm_of([square(gradient) for gradient in gradients_of(stage.module)])
        scaled(clip_factor(own, _MAX_NORM))(stage.module)


def _twice(factor: float, parts: Parts) -> None:
    parts.gradients.scale(factor)
    parts.gradients.scale(factor)


SPECIMENS: Mapping[str, Specimen] = {
    "norm-of-rank": Specimen(
        summary="each rank takes the norm over its own stages, and clips by it",
        origin="pytorch/torchtitan#596; Modalities/modalities#313",
        classes=("tF", "mD"),
        fault=Fault("norm", "grad-norm"),
        needs=Needs(ranks=2),
        plant=on_work(scale=_clipped_by_rank),
        drive=on_steps(told=_norm_of_rank),
    ),
    "norm-without-stage": Specimen(
        summary="the norm leaves out the middle stage",
        origin="deepspeedai/DeepSpeed#1522: stages that differ in their groups of parameters",
        classes=("tF", "mD", "mI"),
        fault=Fault("norm", "grad-norm", stage=middle),
        needs=_SEVERAL,
        plant=on_work(squares=_without_middle),
    ),
    "norm-rounded": Specimen(
        summary="sums of squares are added in bf16",
        origin="pytorch/torchtitan#4135",
        classes=("tF",),
        fault=Fault("norm", "grad-norm", alike=("rounded",)),
        plant=on_work(squares=_in_bf16),
    ),
    "norm-after-clipping": Specimen(
        summary="the norm that is reported is the one after clipping",
        origin="no report: the class of pytorch/torchtitan#1258, where norm and clipping see different gradients",
        classes=("tF",),
        fault=Fault("norm", "grad-norm", alike=("report",)),
        drive=on_steps(told=_after_clipping),
    ),
    "clip-last-stage": Specimen(
        summary="gradients are clipped on the last stage alone",
        origin="pytorch/torchtitan#596, NVIDIA-NeMo/Automodel#3816",
        classes=("tF", "mD"),
        fault=_CLIP,
        needs=_SEVERAL,
        plant=on_work(scale=_last_alone),
    ),
    "clip-never": Specimen(
        summary="the norm uses up the list of parameters, and clipping sees none",
        origin="pytorch/torchtitan#1258",
        classes=("tF",),
        fault=_CLIP,
        plant=on_work(scale=lambda factor, parts: None),
    ),
    "clip-by-stage": Specimen(
        summary="each stage is clipped by its own norm, though the norm reported is right",
        origin="pytorch/torchtitan#649: one norm for each part of the model",
        classes=("tF", "mD"),
        fault=_CLIP,
        needs=_SEVERAL,
        plant=on_work(scale=_by_stage),
    ),
    "clip-twice": Specimen(
        summary="gradients are clipped twice by one factor",
        origin="no report: the class of deepspeedai/DeepSpeed#7847, reductions done twice",
        classes=("mD",),
        fault=_CLIP,
        plant=on_work(scale=_twice),
    ),
    "update-skipped-on-stage": Specimen(
        summary="one stage decides by itself to skip the update",
        origin="hpcaitech/ColossalAI#80",
        classes=("mD",),
        fault=Fault("update", "updated-parameters", stage=middle),
        plant=on_gradients(nn.Module.zero_grad, middle, clipped=True),
    ),
    "updated-twice": Specimen(
        summary="the middle stage's parameters are in two groups of the optimizer and are moved twice",
        origin="NVIDIA/Megatron-LM#4641: copies routed to different optimizers",
        classes=("mD",),
        fault=Fault("update", "updated-parameters", stage=middle),
        drive=moved_twice(middle),
    ),
}
