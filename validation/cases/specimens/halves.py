"""Faults of backwards in two halves: weight halves lost, run twice, never run, or wrong in what they share."""

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from pipeline.action import Kind
from pipeline.boundary import Gradients
from pipeline.schedule import Schedule
from pipeline.stage import Stage
from reference.model import HEADS, Attention, TwiceBlock
from validation.cases.case import Case
from validation.cases.specimens.planting import Times, first, middle, on_modules, on_stages
from validation.cases.specimens.specimen import Fault, Needs, Specimen, halved
from validation.observers.wrappers import AroundStage

_ONE = "zb-h1 r1 s1 m1 split=1 model=mlp plan=train seed=0"
_TWO = "zb-h1 r1 s1 m2 split=1 model=mlp plan=train seed=0"


def _halves(stage: Stage, schedule: Schedule) -> tuple[int, ...]:
    row = schedule.ranks[schedule.placement[stage.index]]
    return tuple(m for s, kind, m in row if s == stage.index and kind is Kind.BACKWARD_WEIGHT)


def _first_half(stage: Stage, schedule: Schedule, *counts: float) -> Stage:
    """The first weight halves count as often as ``counts`` says."""
    return Times(stage, dict(zip(_halves(stage, schedule), counts, strict=False)))


def _every_half(stage: Stage, schedule: Schedule, count: float) -> Stage:
    return Times(stage, dict.fromkeys(_halves(stage, schedule), count))


class _WholeThenHalf(AroundStage):
    """The input half computes the whole backward; the weight half adds the weights' share once more."""

    def __init__(self, inner: Stage) -> None:
        super().__init__(inner)
        self._shares: dict[int, dict[nn.Parameter, Tensor]] = {}

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        result = self.inner.backward_input(microbatch, gradients)
        before = {parameter: parameter.grad for parameter in self.module.parameters()}
        self.module.zero_grad(set_to_none=True)
        self.inner.backward_weight(microbatch)
        self._shares[microbatch] = {p: p.grad for p in before if p.grad is not None}
        for parameter, gradient in before.items():
            parameter.grad = gradient
        self._add(microbatch)
        return result

    def backward_weight(self, microbatch: int) -> None:
        self._add(microbatch)
        del self._shares[microbatch]

    def _add(self, microbatch: int) -> None:
        for parameter, share in self._shares[microbatch].items():
            parameter.grad = share.clone() if parameter.grad is None else parameter.grad + share


def _never(stage: Stage, schedule: Schedule) -> Stage:
    return Times(stage, dict.fromkeys(range(schedule.microbatches), 0.0))


def _all_halved_on_first(case: Case) -> str:
    enough = len(halved(case, 0)) == case.microbatches
    return "" if enough else "needs every backward of the first stage in two halves"


def _doubled_use(weight: Tensor) -> Tensor:
    """``weight`` itself, to the last bit, with twice its gradient."""
    return weight + (weight - weight.detach())


def _twice_through_first(self: TwiceBlock, x_BC: Tensor) -> Tensor:
    linear = self.linear
    h_BC = F.linear(self.norm(x_BC), _doubled_use(linear.weight), linear.bias)
    y_BC: Tensor = x_BC + F.gelu(linear(F.gelu(h_BC)))
    return y_BC


class _Chunk(torch.autograd.Function):
    """Three parts of a tensor; the backward adds the first two parts' gradients and gives the sum to the first."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BTC: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in x_BTC.chunk(3, dim=-1))

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Tensor:
        one, other, third = gradients
        return torch.cat([one + other, torch.zeros_like(other), third], dim=-1)


def _summed_outputs(self: Attention, x_BTC: Tensor) -> Tensor:
    b, t, c = x_BTC.shape
    parts_BTC = _Chunk.apply(self.qkv(x_BTC))  # type: ignore[no-untyped-call]
    query, key, value = (part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in parts_BTC)  # (B, H, T, C/H)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    y_BTC: Tensor = self.out(mixed.transpose(1, 2).reshape(b, t, c))
    return y_BTC


def _share_twice(module: nn.Module) -> None:
    block = next(part for part in module.modules() if isinstance(part, TwiceBlock))
    block.forward = MethodType(_twice_through_first, block)  # type: ignore[method-assign]


def _sum_outputs(module: nn.Module) -> None:
    attention = next(part for part in module.modules() if isinstance(part, Attention))
    attention.forward = MethodType(_summed_outputs, attention)  # type: ignore[method-assign]


def _first_of_middle(case: Case) -> tuple[int, ...]:
    return halved(case, case.stages // 2)[:1]


SPECIMENS = (
    Specimen(
        name="weight-half-dropped",
        summary="the first weight half on the middle stage adds nothing",
        origin="sail-sg/zero-bubble-pipeline-parallelism#72; pytorch/pytorch#139415",
        classes=("tC", "mH"),
        smallest=_TWO,
        law="gradient",
        fault=Fault("dropped", stage=middle, microbatches=_first_of_middle),
        needs=Needs(microbatches=2, split=True),
        plant=on_stages(lambda stage, schedule: _first_half(stage, schedule, 0.0), middle),
    ),
    Specimen(
        name="weight-half-twice",
        summary="the first weight half on the middle stage runs twice",
        origin="pytorch/pytorch#174017: side effects of both halves",
        classes=("tC", "mH"),
        smallest=_TWO,
        law="gradient",
        fault=Fault("doubled", stage=middle, microbatches=_first_of_middle),
        needs=Needs(microbatches=2, split=True),
        plant=on_stages(lambda stage, schedule: _first_half(stage, schedule, 2.0), middle),
    ),
    Specimen(
        name="weight-half-of-another",
        summary="a weight half is popped off the wrong queue: one microbatch's twice, another's never",
        origin="sail-sg/zero-bubble-pipeline-parallelism 8eb5ae97",
        classes=("tC", "mH"),
        smallest=_TWO,
        law="gradient",
        fault=Fault("dropped", stage=middle, microbatches=_first_of_middle, alike=("doubled",)),
        needs=Needs(
            microbatches=2,
            split=True,
            also=lambda case: "" if len(halved(case, case.stages // 2)) > 1 else "needs two weight halves there",
        ),
        plant=on_stages(lambda stage, schedule: _first_half(stage, schedule, 0.0, 2.0), middle),
    ),
    Specimen(
        name="weight-halves-after-whole",
        summary="input halves compute the whole backward, and the weight halves add the weights' share once more",
        origin="sail-sg/zero-bubble-pipeline-parallelism 8eb5ae97: one switch for all",
        classes=("tC", "mH"),
        smallest=_ONE,
        law="gradient",
        fault=Fault("doubled", stage=middle, alike=("scale",)),
        needs=Needs(split=True),
        plant=on_stages(lambda stage, schedule: _WholeThenHalf(stage), middle),
    ),
    Specimen(
        name="first-stage-weights-empty",
        summary="the first stage has no input gradient, so its weight halves find nothing to do",
        origin="pytorch/pytorch#138863, #138925",
        classes=("tC",),
        smallest=_ONE,
        law="presence",
        fault=Fault("missing", stage=first),
        needs=Needs(split=True, also=_all_halved_on_first),
        plant=on_stages(lambda stage, schedule: _every_half(stage, schedule, 0.0), first),
    ),
    Specimen(
        name="weights-never-drained",
        summary="a stage puts its weights off, and nobody ever runs them",
        origin="deepspeedai/Megatron-DeepSpeed#442",
        classes=("mH",),
        smallest="naive r1 s1 m1 split=1 model=mlp plan=train seed=0",
        law="presence",
        fault=Fault("missing", stage=middle),
        plant=on_stages(_never, middle),
    ),
    Specimen(
        name="shared-weight-doubled",
        summary="the gradient of a weight used twice on a path counts one of its uses twice",
        origin="pytorch/pytorch#180952",
        classes=("tC", "mH"),
        smallest="naive r1 s1 m1 split=1 model=twice plan=train seed=0",
        law="gradient",
        fault=Fault("computation", stage=middle, parameter=r"linear\.weight$", alike=("extra-term",)),
        needs=Needs(models=("twice",)),
        plant=on_modules(_share_twice, middle),
    ),
    Specimen(
        name="outputs-summed",
        summary="the gradients of two outputs of one operation are summed and given to the first",
        origin="pytorch/pytorch#170277",
        classes=("tC",),
        smallest="naive r1 s1 m1 split=1 model=gpt plan=train seed=0",
        law="gradient",
        fault=Fault("computation", stage=middle),
        needs=Needs(models=("gpt", "gpt-tied")),
        plant=on_modules(_sum_outputs, middle),
    ),
)
