"""Faults of the model: a stage computes something else, holds other layers, or draws other random numbers."""

from collections.abc import Callable
from types import MethodType

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from pipeline.boundary import Tensors
from pipeline.schedule import Schedule
from pipeline.stage import Goal, Stage
from reference.model import Attention, DropoutBlock
from validation.cases.specimens.planting import ONE, middle, on_modules, on_stages
from validation.cases.specimens.specimen import Fault, Needs, Specimen
from validation.cases.stages import Slice
from validation.observers.wrappers import AroundStage

_DROPOUT = "naive r1 s1 m1 split=1 model=dropout plan=train seed=0"
_TWO_LAYERS = "naive r1 s1 m1 split=2 model=mlp plan=train seed=0"
_LAYERS = Needs(layers=2, models=("mlp", "twice", "batchnorm"))
_Forward = Callable[..., Tensor | tuple[Tensor, Tensor]]


def _dropout(module: nn.Module) -> list[DropoutBlock]:
    return [block for block in module.modules() if isinstance(block, DropoutBlock)]


def _count_from_zero(module: nn.Module) -> None:
    for layer, block in enumerate(_dropout(module)):
        block.layer = layer


def _other_seed(module: nn.Module) -> None:
    for block in _dropout(module):
        block.seed += 1


class _WithValue(torch.autograd.Function):
    """The value of one tensor with the derivative of another."""

    @staticmethod
    def forward(ctx: FunctionCtx, derived: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _recomputed(forward: _Forward) -> _Forward:
    """The block's forward, whose backward computes it again with a fresh mask."""

    def twice(self: DropoutBlock, x_BC: Tensor, key: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        right, fresh = forward(x_BC, key), forward(x_BC, key + 1)
        if isinstance(right, Tensor) and isinstance(fresh, Tensor):
            mixed: Tensor = _WithValue.apply(fresh, right.detach())  # type: ignore[no-untyped-call]
            return mixed
        return _WithValue.apply(fresh[0], right[0].detach()), key  # type: ignore[no-untyped-call]

    return twice


def _recompute(module: nn.Module) -> None:
    for block in _dropout(module):
        block.forward = MethodType(_recomputed(block.forward), block)  # type: ignore[method-assign]


def _blind_to_order(self: Attention, x_BTC: Tensor) -> Tensor:
    b, t, c = x_BTC.shape
    heads = 4
    parts_BTC = self.qkv(x_BTC).chunk(3, dim=-1)
    query, key, value = (part.view(b, t, heads, c // heads).transpose(1, 2) for part in parts_BTC)
    mixed = nn.functional.scaled_dot_product_attention(query, key, value)  # every token sees every other one
    y_BTC: Tensor = self.out(mixed.transpose(1, 2).reshape(b, t, c))
    return y_BTC


def _unmask(module: nn.Module) -> None:
    for block in module.modules():
        if isinstance(block, Attention):
            block.forward = MethodType(_blind_to_order, block)  # type: ignore[method-assign]


def _reseed(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.1, generator=generator)


def _other_epsilon(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.LayerNorm | nn.BatchNorm1d):
            part.eps = 1e-2


def _turn(module: nn.Module) -> None:
    assert isinstance(module, Slice), "stages here are slices of a model"
    module.pieces.reverse()


def _skip_layer(module: nn.Module) -> None:
    assert isinstance(module, Slice), "stages here are slices of a model"
    module.pieces.pop()


def _repeat_layer(module: nn.Module) -> None:
    assert isinstance(module, Slice), "stages here are slices of a model"
    module.pieces.append(module.pieces[-1])


class _NoSideInput(AroundStage):
    """A middle stage that is given no side input, and takes 0 in its place."""

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        return self.inner.forward(microbatch, (inputs[0], torch.zeros_like(inputs[1])), goal)


class _InBF16(AroundStage):
    """A stage under autocast."""

    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = self.inner.forward(microbatch, inputs, goal)
        return outputs


def _around(wrap: type[AroundStage]) -> Callable[[Stage, Schedule], Stage]:
    return lambda stage, schedule: wrap(stage)


SPECIMENS = (
    Specimen(
        name="layers-counted-from-zero",
        summary="a stage numbers its layers from 0, so what depends on a layer's number is wrong",
        origin="NVIDIA/Megatron-LM 0504e973",
        classes=("mK",),
        smallest="naive r2 s2 m1 split=1,1 model=dropout plan=train seed=0",
        law="loss",
        fault=Fault("randomness", stage=middle, alike=("computation", "partition")),
        needs=Needs(stages=2, models=("dropout",)),
        plant=on_modules(_count_from_zero, middle),
    ),
    Specimen(
        name="dropout-other-seed",
        summary="one stage draws its dropout masks from another seed",
        origin="pytorch/pytorch#55036; pytorch/pytorch#139304",
        classes=("tH", "tJ"),
        smallest=_DROPOUT,
        law="loss",
        fault=Fault("randomness", stage=middle, alike=("computation",)),
        needs=Needs(models=("dropout",)),
        plant=on_modules(_other_seed, middle),
    ),
    Specimen(
        name="recomputed-with-fresh-mask",
        summary="a recomputed forward draws a fresh dropout mask: the loss is right, the gradient another function's",
        origin="allenai/OLMo-core#828",
        classes=("tH",),
        smallest=_DROPOUT,
        law="gradient",
        fault=Fault("randomness", stage=middle, alike=("computation",)),
        needs=Needs(models=("dropout",)),
        plant=on_modules(_recompute, middle),
    ),
    Specimen(
        name="weights-of-other-seed",
        summary="one stage draws its initial weights from a seed of its own",
        origin="pytorch/torchtitan#514; pytorch/pytorch#139304",
        classes=("tJ",),
        smallest=ONE,
        law="loss",
        fault=Fault("randomness", stage=middle, alike=("computation", "partition")),
        plant=on_modules(_reseed, middle),
    ),
    Specimen(
        name="side-input-missing",
        summary="a middle stage is given no side input",
        origin="AMD-AGI/Primus#277; NVIDIA-NeMo/Megatron-Bridge#3926",
        classes=("tG", "mJ"),
        smallest=_DROPOUT,
        law="loss",
        fault=Fault("altered", stage=middle, alike=("randomness", "computation", "zero")),
        needs=Needs(models=("dropout",)),
        plant=on_stages(_around(_NoSideInput), middle),
    ),
    Specimen(
        name="mask-missing",
        summary="attention on one stage is not causal",
        origin="pytorch/torchtitan#1723: masks under microbatches",
        classes=("tG",),
        smallest="naive r1 s1 m1 split=1 model=gpt plan=train seed=0",
        law="loss",
        fault=Fault("computation", stage=middle),
        needs=Needs(models=("gpt", "gpt-tied")),
        plant=on_modules(_unmask, middle),
    ),
    Specimen(
        name="other-epsilon",
        summary="norms on one stage were built with another epsilon",
        origin="the class of options that reach some stages only (NVIDIA/Megatron-LM#4641)",
        classes=("mK",),
        smallest=ONE,
        law="loss",
        fault=Fault("computation", stage=middle),
        plant=on_modules(_other_epsilon, middle),
    ),
    Specimen(
        name="stage-in-bf16",
        summary="one stage computes under autocast, the others do not",
        origin="pytorch/pytorch#116183",
        classes=("tH",),
        smallest=ONE,
        law="loss",
        fault=Fault("rounded", stage=middle, alike=("computation",)),
        plant=on_stages(_around(_InBF16), middle),
    ),
    Specimen(
        name="layers-in-other-order",
        summary="the layers of one stage run in the wrong order",
        origin="NVIDIA/Megatron-LM 0504e973 and the class of wrong layer offsets",
        classes=("mK",),
        smallest=_TWO_LAYERS,
        law="loss",
        fault=Fault("partition", stage=middle, alike=("computation",)),
        needs=_LAYERS,
        plant=on_modules(_turn, middle),
    ),
    Specimen(
        name="layer-skipped",
        summary="the last layer of a stage is nobody's",
        origin="arXiv 2506.09280, its class of wrong stage divisions",
        classes=("mK",),
        smallest=_TWO_LAYERS,
        law="presence",
        fault=Fault("partition", stage=middle, alike=("missing", "computation")),
        needs=_LAYERS,
        plant=on_modules(_skip_layer, middle),
    ),
    Specimen(
        name="layer-repeated",
        summary="the last layer of a stage runs twice",
        origin="arXiv 2506.09280, its class of wrong stage divisions",
        classes=("mK",),
        smallest=_TWO_LAYERS,
        law="loss",
        fault=Fault("partition", stage=middle, alike=("computation",)),
        needs=_LAYERS,
        plant=on_modules(_repeat_layer, middle),
    ),
)
