"""Faults of backwards in two halves: weight halves lost, run twice, never run, or wrong in what they share."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from pipeproof.cases.case import Case
from pipeproof.cases.specimens.model import attended, with_forward, with_value
from pipeproof.cases.specimens.planting import (
    Shares,
    add,
    apart,
    around_stages,
    counted,
    first,
    middle,
    on_modules,
)
from pipeproof.cases.specimens.specimen import Fault, Needs, Plant, Specimen, halved
from pipeproof.observers.wrappers import AroundStage
from pipeproof.pipeline.boundary import Gradients
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.stage import Stage
from pipeproof.reference.model import Attention, TwiceBlock

_HALVES, _TWO_HALVES = Needs(split=True), Needs(microbatches=2, split=True)


def _first_halves(*counts: float) -> Plant:
    """The first weight halves of the middle stage count as often as ``counts`` says."""
    return counted(lambda schedule, stage: dict(zip(halved(schedule, stage), counts, strict=False)), middle)


class _WholeThenHalf(AroundStage):
    """The input half computes the whole backward; the weight half adds the weights' share once more."""

    def __init__(self, inner: Stage, schedule: Schedule) -> None:
        super().__init__(inner)
        self._shares: dict[int, Shares] = {}

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        handed = self.inner.backward_input(microbatch, gradients)
        with apart(self.module) as self._shares[microbatch]:
            self.inner.backward_weight(microbatch)
        add(self._shares[microbatch])
        return handed

    def backward_weight(self, microbatch: int) -> None:
        add(self._shares.pop(microbatch))


def _all_halved_on_first(case: Case) -> str:
    enough = len(halved(case.built, 0)) == case.microbatches
    return "" if enough else "needs every backward of the first stage in two halves"


def _doubled_use(weight: Tensor) -> Tensor:
    """``weight`` itself, to the last bit, with twice its gradient."""
    return weight + (weight - weight.detach())


def _twice_through_first(self: TwiceBlock, x_BC: Tensor) -> Tensor:
    linear = self.linear
    h_BC = F.linear(self.norm(x_BC), _doubled_use(linear.weight), linear.bias)
    y_BC: Tensor = x_BC + F.gelu(linear(F.gelu(h_BC)))
    return y_BC


def _summed_outputs(self: Attention, x_BTC: Tensor) -> Tensor:
    """The first two outputs' gradients both go to the first."""
    one, other, third = self.qkv(x_BTC).chunk(3, dim=-1)
    return attended(self, x_BTC, (one, with_value(one, other), third))


def _first_of_middle(case: Case) -> tuple[int, ...]:
    return halved(case.built, case.stages // 2)[:1]


def _two_halves(case: Case) -> str:
    return "" if len(halved(case.built, case.stages // 2)) > 1 else "needs two weight halves there"


SPECIMENS: Mapping[str, Specimen] = {
    "weight-half-dropped": Specimen(
        summary="the first weight half on the middle stage adds nothing",
        origin="sail-sg/zero-bubble-pipeline-parallelism#72; pytorch/pytorch#139415",
        classes=("tC", "mH"),
        fault=Fault("dropped", "gradient", stage=middle, microbatches=_first_of_middle),
        needs=_TWO_HALVES,
        plant=_first_halves(0.0),
    ),
    "weight-half-twice": Specimen(
        summary="the first weight half on the middle stage runs twice",
        origin="pytorch/pytorch#174017: side effects of both halves",
        classes=("tC", "mH"),
        fault=Fault("doubled", "gradient", stage=middle, microbatches=_first_of_middle),
        needs=_TWO_HALVES,
        plant=_first_halves(2.0),
    ),
    "weight-half-of-another": Specimen(
        summary="a weight half is popped off the wrong queue: one microbatch's twice, another's never",
        origin="sail-sg/zero-bubble-pipeline-parallelism 8eb5ae97",
        classes=("tC", "mH"),
        fault=Fault("dropped", "gradient", stage=middle, microbatches=_first_of_middle, alike=("doubled",)),
        needs=Needs(microbatches=2, split=True, also=_two_halves),
        plant=_first_halves(0.0, 2.0),
    ),
    "weight-halves-after-whole": Specimen(
        summary="input halves compute the whole backward, and the weight halves add the weights' share once more",
        origin="sail-sg/zero-bubble-pipeline-parallelism 8eb5ae97: one switch for all",
        classes=("tC", "mH"),
        fault=Fault("doubled", "gradient", stage=middle, alike=("scale",)),
        needs=_HALVES,
        plant=around_stages(_WholeThenHalf, middle),
    ),
    "first-stage-weights-empty": Specimen(
        summary="the first stage has no input gradient, so its weight halves find nothing to do",
        origin="pytorch/pytorch#138863, #138925",
        classes=("tC",),
        fault=Fault("missing", "presence", stage=first),
        needs=Needs(split=True, also=_all_halved_on_first),
        plant=counted(lambda schedule, stage: dict.fromkeys(halved(schedule, stage), 0.0), first),
    ),
    "weights-never-drained": Specimen(
        summary="a stage puts its weights off, and nobody ever runs them",
        origin="deepspeedai/Megatron-DeepSpeed#442",
        classes=("mH",),
        fault=Fault("missing", "presence", stage=middle),
        plant=counted(lambda schedule, stage: dict.fromkeys(range(schedule.microbatches), 0.0), middle),
    ),
    "shared-weight-doubled": Specimen(
        summary="the gradient of a weight used twice on a path counts one of its uses twice",
        origin="pytorch/pytorch#180952",
        classes=("tC", "mH"),
        fault=Fault("computation", "gradient", stage=middle, parameter=r"linear\.weight$", alike=("extra-term",)),
        needs=Needs(models=("twice",)),
        plant=on_modules(with_forward(TwiceBlock, _twice_through_first, most=1), middle),
    ),
    "outputs-summed": Specimen(
        summary="the gradients of two outputs of one operation are summed and given to the first",
        origin="pytorch/pytorch#170277",
        classes=("tC",),
        fault=Fault("computation", "gradient", stage=middle),
        needs=Needs(models=("gpt", "gpt-tied")),
        plant=on_modules(with_forward(Attention, _summed_outputs, most=1), middle),
    ),
}
