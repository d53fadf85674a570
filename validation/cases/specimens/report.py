"""Faults of reports: what was computed is right, what the step says of it is not."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from pipeproof.cases.specimens.planting import on_steps, rounded
from pipeproof.cases.specimens.specimen import Drive, Fault, Needs, Specimen
from pipeproof.pipeline.step import Parts, StepResult

_Tell = Callable[[StepResult, Parts], StepResult]
_specimen = partial(Specimen, fault=Fault("report", "loss"))


def _elsewhere(tell: _Tell) -> Drive:
    """On ranks without the last stage, which has the losses."""

    def told(result: StepResult, parts: Parts) -> StepResult:
        here = parts.program.schedule.placement[-1] == parts.transport.rank
        return result if here else tell(result, parts)

    return on_steps(told=told)


def _minus_one(result: StepResult, parts: Parts) -> StepResult:
    return replace(result, loss=-1.0, losses=(-1.0,) * len(result.losses))


def _half(result: StepResult, parts: Parts) -> StepResult:
    loss, *losses = rounded(torch.tensor([result.loss, *result.losses]), torch.float16).tolist()
    return replace(result, loss=loss, losses=tuple(losses))


def _divided(result: StepResult, parts: Parts) -> StepResult:
    count = parts.program.schedule.microbatches
    return replace(result, loss=result.loss / count, losses=tuple(loss / count for loss in result.losses))


def _none(result: StepResult, parts: Parts) -> StepResult:
    return replace(result, loss=math.nan, grad_norm=None) if parts.transport.rank == 0 else result


SPECIMENS: Mapping[str, Specimen] = {
    "loss-of-other-ranks": _specimen(
        summary="ranks without the last stage report -1 as the loss",
        origin="pytorch/torchtitan#931, #1232",
        classes=("tJ",),
        needs=Needs(ranks=2),
        drive=_elsewhere(_minus_one),
    ),
    "loss-sent-as-half": _specimen(
        summary="other ranks get the loss in fp16",
        origin="deepspeedai/DeepSpeed#4726",
        classes=("tJ", "mF"),
        fault=Fault("report", "loss", alike=("rounded",)),
        needs=Needs(ranks=2),
        drive=_elsewhere(_half),
    ),
    "loss-divided-in-place": _specimen(
        summary="the losses that are reported share memory with those that the schedule divides",
        origin="AMD-AGI/Primus#1079",
        classes=("mA",),
        needs=Needs(microbatches=2),
        drive=on_steps(told=_divided),
    ),
    "loss-of-last-microbatch": _specimen(
        summary="the loss that is reported is the last microbatch's",
        origin="deepspeedai/DeepSpeed#3367",
        classes=("tJ",),
        needs=Needs(microbatches=2),
        drive=on_steps(told=lambda result, parts: replace(result, loss=result.losses[-1])),
    ),
    "loss-summed": _specimen(
        summary="the loss that is reported is the sum where the mean is differentiated",
        origin="deepspeedai/DeepSpeed#7773",
        classes=("tA", "mA"),
        needs=Needs(microbatches=2),
        drive=on_steps(told=lambda result, parts: replace(result, loss=math.fsum(result.losses))),
    ),
    "losses-in-other-order": _specimen(
        summary="losses are reported in the order of their backwards, last first",
        origin="no report: the class of pytorch/torchtitan#931, losses looked up in the wrong place",
        classes=("tJ",),
        needs=Needs(microbatches=2),
        drive=on_steps(told=lambda result, parts: replace(result, losses=result.losses[::-1])),
    ),
    "evaluation-divided-again": _specimen(
        summary="an evaluation's loss is divided by the number of microbatches once more",
        origin="pytorch/torchtitan#2366, #4167",
        classes=("tA",),
        needs=Needs(microbatches=2, plan=("eval", "train")),
        drive=on_steps(told=_divided, operation="eval"),
    ),
    "nothing-reported": _specimen(
        summary="rank 0 reports no norm, and a loss that is not a number",
        origin="huggingface/nanotron#405",
        classes=("tJ",),
        fault=Fault("report", "grad-norm", alike=("norm", "not-finite")),
        drive=on_steps(told=_none),
    ),
}
