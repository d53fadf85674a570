"""Faults of reports: what was computed is right, what the step says of it is not."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from pipeline.step import Parts, StepResult
from validation.cases.specimens.planting import ONE, ONE_OF_TWO, TWO_STAGES, rounded
from validation.cases.specimens.specimen import Drive, Fault, Needs, Specimen
from validation.observers.wrappers import AroundSteps, Steps

_Tell = Callable[[StepResult, Parts], StepResult]


class _Told(AroundSteps):
    """Reports what ``tell`` makes of the result."""

    def __init__(self, inner: Steps, *, operation: str, tell: _Tell) -> None:
        super().__init__(inner)
        self._operation = operation
        self._tell = tell

    def told(self, operation: str, result: StepResult) -> StepResult:
        return self._tell(result, self.parts) if operation == self._operation else result


def _telling(tell: _Tell, operation: str = "train") -> Drive:
    return partial(_Told, operation=operation, tell=tell)


def _has_losses(parts: Parts) -> bool:
    return parts.program.schedule.placement[-1] == parts.transport.rank


def _none_elsewhere(result: StepResult, parts: Parts) -> StepResult:
    if _has_losses(parts):
        return result
    return replace(result, loss=-1.0, losses=(-1.0,) * len(result.losses))


def _half_elsewhere(result: StepResult, parts: Parts) -> StepResult:
    if _has_losses(parts):
        return result
    loss, *losses = rounded(torch.tensor([result.loss, *result.losses]), torch.float16).tolist()
    return replace(result, loss=loss, losses=tuple(losses))


def _divided(result: StepResult, parts: Parts) -> StepResult:
    count = parts.program.schedule.microbatches
    return replace(result, loss=result.loss / count, losses=tuple(loss / count for loss in result.losses))


def _of_last(result: StepResult, parts: Parts) -> StepResult:
    return replace(result, loss=result.losses[-1])


def _summed(result: StepResult, parts: Parts) -> StepResult:
    return replace(result, loss=math.fsum(result.losses))


def _turned(result: StepResult, parts: Parts) -> StepResult:
    return replace(result, losses=result.losses[::-1])


def _none(result: StepResult, parts: Parts) -> StepResult:
    return replace(result, loss=math.nan, grad_norm=None) if parts.transport.rank == 0 else result


SPECIMENS = (
    Specimen(
        name="loss-of-other-ranks",
        summary="ranks without the last stage report -1 as the loss",
        origin="pytorch/torchtitan#931, #1232",
        classes=("tJ",),
        smallest=TWO_STAGES,
        law="loss",
        fault=Fault("report"),
        needs=Needs(ranks=2),
        drive=_telling(_none_elsewhere),
    ),
    Specimen(
        name="loss-sent-as-half",
        summary="other ranks get the loss in fp16",
        origin="deepspeedai/DeepSpeed#4726",
        classes=("tJ", "mF"),
        smallest=TWO_STAGES,
        law="loss",
        fault=Fault("report", alike=("rounded",)),
        needs=Needs(ranks=2),
        drive=_telling(_half_elsewhere),
    ),
    Specimen(
        name="loss-divided-in-place",
        summary="the losses that are reported share memory with those that the schedule divides",
        origin="AMD-AGI/Primus#1079",
        classes=("mA",),
        smallest=ONE_OF_TWO,
        law="loss",
        fault=Fault("report"),
        needs=Needs(microbatches=2),
        drive=_telling(_divided),
    ),
    Specimen(
        name="loss-of-last-microbatch",
        summary="the loss that is reported is the last microbatch's",
        origin="deepspeedai/DeepSpeed#3367",
        classes=("tJ",),
        smallest=ONE_OF_TWO,
        law="loss",
        fault=Fault("report"),
        needs=Needs(microbatches=2),
        drive=_telling(_of_last),
    ),
    Specimen(
        name="loss-summed",
        summary="the loss that is reported is the sum where the mean is differentiated",
        origin="deepspeedai/DeepSpeed#7773",
        classes=("tA", "mA"),
        smallest=ONE_OF_TWO,
        law="loss",
        fault=Fault("report"),
        needs=Needs(microbatches=2),
        drive=_telling(_summed),
    ),
    Specimen(
        name="losses-in-other-order",
        summary="losses are reported in the order of their backwards, last first",
        origin="no report: the class of pytorch/torchtitan#931, losses looked up in the wrong place",
        classes=("tJ",),
        smallest=ONE_OF_TWO,
        law="loss",
        fault=Fault("report"),
        needs=Needs(microbatches=2),
        drive=_telling(_turned),
    ),
    Specimen(
        name="evaluation-divided-again",
        summary="an evaluation's loss is divided by the number of microbatches once more",
        origin="pytorch/torchtitan#2366, #4167",
        classes=("tA",),
        smallest="naive r1 s1 m2 split=1 model=mlp plan=eval+train seed=0",
        law="loss",
        fault=Fault("report"),
        needs=Needs(microbatches=2, plan=("eval", "train")),
        drive=_telling(_divided, "eval"),
    ),
    Specimen(
        name="nothing-reported",
        summary="rank 0 reports no norm, and a loss that is not a number",
        origin="huggingface/nanotron#405",
        classes=("tJ",),
        smallest=ONE,
        law="grad-norm",
        fault=Fault("report", alike=("norm", "not-finite")),
        drive=_telling(_none),
    ),
)
