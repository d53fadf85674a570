"""Faults of the model: a stage computes something else, holds other layers, or draws other random numbers."""

from collections.abc import Callable, Sequence
from types import MethodType

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from reference.model import HEADS, Attention, DropoutBlock
from validation.cases.specimens.planting import Change, Changes, middle, on_modules, on_stages
from validation.cases.specimens.specimen import Fault, Needs, Specimen
from validation.cases.stages import Slice

_DROPOUT = Needs(models=("dropout",))
_LAYERS = Needs(layers=2, models=("mlp", "twice", "batchnorm"))


def with_forward(kind: type[nn.Module], forward: Callable[..., object], *, most: int | None = None) -> Change:
    """The blocks of a kind, or the first ``most`` of them, compute ``forward``."""

    def change(module: nn.Module) -> None:
        for block in [part for part in module.modules() if isinstance(part, kind)][:most]:
            block.forward = MethodType(forward, block)

    return change


def attended(self: Attention, x_BTC: Tensor, parts_BTC: Sequence[Tensor], *, causal: bool = True) -> Tensor:
    """What ``self`` makes of queries, keys and values."""
    b, t, c = x_BTC.shape
    query, key, value = (part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in parts_BTC)  # (B, H, T, C/H)
    mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    y_BTC: Tensor = self.out(mixed.transpose(1, 2).reshape(b, t, c))
    return y_BTC


def _blind_to_order(self: Attention, x_BTC: Tensor) -> Tensor:
    """Every token sees every other one."""
    return attended(self, x_BTC, self.qkv(x_BTC).chunk(3, dim=-1), causal=False)


def _on_dropout(change: Callable[[int, DropoutBlock], object]) -> Change:
    """Changes each dropout block of a stage, given its number there."""

    def changed(module: nn.Module) -> None:
        for number, block in enumerate(part for part in module.modules() if isinstance(part, DropoutBlock)):
            change(number, block)

    return changed


class _WithValue(torch.autograd.Function):
    """The value of one tensor with the derivative of another."""

    @staticmethod
    def forward(ctx: FunctionCtx, derived: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _recomputed(self: DropoutBlock, x_BC: Tensor, key: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """The block's forward, whose backward computes it again with a fresh mask."""
    right, fresh = DropoutBlock.forward(self, x_BC, key), DropoutBlock.forward(self, x_BC, key + 1)
    if isinstance(right, Tensor) and isinstance(fresh, Tensor):
        mixed: Tensor = _WithValue.apply(fresh, right.detach())  # type: ignore[no-untyped-call]
        return mixed
    return _WithValue.apply(fresh[0], right[0].detach()), key  # type: ignore[no-untyped-call]


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


def _on_pieces(change: Callable[[list[str]], object]) -> Change:
    """Changes the layers that a stage has."""

    def changed(module: nn.Module) -> None:
        assert isinstance(module, Slice), "stages here are slices of a model"
        change(module.pieces)

    return changed


SPECIMENS = (
    Specimen(
        name="layers-counted-from-zero",
        summary="a stage numbers its layers from 0, so what depends on a layer's number is wrong",
        origin="NVIDIA/Megatron-LM 0504e973",
        classes=("mK",),
        fault=Fault("randomness", "loss", stage=middle, alike=("computation", "partition")),
        needs=Needs(stages=2, models=("dropout",)),
        plant=on_modules(_on_dropout(lambda number, block: setattr(block, "layer", number)), middle),
    ),
    Specimen(
        name="dropout-other-seed",
        summary="one stage draws its dropout masks from another seed",
        origin="pytorch/pytorch#55036; pytorch/pytorch#139304",
        classes=("tH", "tJ"),
        fault=Fault("randomness", "loss", stage=middle, alike=("computation",)),
        needs=_DROPOUT,
        plant=on_modules(_on_dropout(lambda number, block: setattr(block, "seed", block.seed + 1)), middle),
    ),
    Specimen(
        name="recomputed-with-fresh-mask",
        summary="a recomputed forward draws a fresh dropout mask: the loss is right, the gradient another function's",
        origin="allenai/OLMo-core#828",
        classes=("tH",),
        fault=Fault("randomness", "gradient", stage=middle, alike=("computation",)),
        needs=_DROPOUT,
        plant=on_modules(with_forward(DropoutBlock, _recomputed), middle),
    ),
    Specimen(
        name="weights-of-other-seed",
        summary="one stage draws its initial weights from a seed of its own",
        origin="pytorch/torchtitan#514; pytorch/pytorch#139304",
        classes=("tJ",),
        fault=Fault("randomness", "loss", stage=middle, alike=("computation", "partition")),
        plant=on_modules(_reseed, middle),
    ),
    Specimen(
        name="side-input-missing",
        summary="a middle stage is given no side input",
        origin="AMD-AGI/Primus#277; NVIDIA-NeMo/Megatron-Bridge#3926",
        classes=("tG", "mJ"),
        fault=Fault("altered", "loss", stage=middle, alike=("randomness", "computation", "zero")),
        needs=_DROPOUT,
        plant=on_stages(Changes(inputs=lambda inputs, call: (inputs[0], torch.zeros_like(inputs[1]))), middle),
    ),
    Specimen(
        name="mask-missing",
        summary="attention on one stage is not causal",
        origin="pytorch/torchtitan#1723: masks under microbatches",
        classes=("tG",),
        fault=Fault("computation", "loss", stage=middle),
        needs=Needs(models=("gpt", "gpt-tied")),
        plant=on_modules(with_forward(Attention, _blind_to_order), middle),
    ),
    Specimen(
        name="other-epsilon",
        summary="norms on one stage were built with another epsilon",
        origin="the class of options that reach some stages only (NVIDIA/Megatron-LM#4641)",
        classes=("mK",),
        fault=Fault("computation", "loss", stage=middle),
        plant=on_modules(_other_epsilon, middle),
    ),
    Specimen(
        name="stage-in-bf16",
        summary="one stage computes under autocast, the others do not",
        origin="pytorch/pytorch#116183",
        classes=("tH",),
        fault=Fault("rounded", "loss", stage=middle, alike=("computation",)),
        plant=on_stages(Changes(during=lambda call: torch.autocast("cpu", torch.bfloat16)), middle),
    ),
    Specimen(
        name="layers-in-other-order",
        summary="the layers of one stage run in the wrong order",
        origin="NVIDIA/Megatron-LM 0504e973 and the class of wrong layer offsets",
        classes=("mK",),
        fault=Fault("partition", "loss", stage=middle, alike=("computation",)),
        needs=_LAYERS,
        plant=on_modules(_on_pieces(lambda pieces: pieces.reverse()), middle),
    ),
    Specimen(
        name="layer-skipped",
        summary="the last layer of a stage is nobody's",
        origin="arXiv 2506.09280, its class of wrong stage divisions",
        classes=("mK",),
        fault=Fault("partition", "presence", stage=middle, alike=("missing", "computation")),
        needs=_LAYERS,
        plant=on_modules(_on_pieces(lambda pieces: pieces.pop()), middle),
    ),
    Specimen(
        name="layer-repeated",
        summary="the last layer of a stage runs twice",
        origin="arXiv 2506.09280, its class of wrong stage divisions",
        classes=("mK",),
        fault=Fault("partition", "loss", stage=middle, alike=("computation",)),
        needs=_LAYERS,
        plant=on_modules(_on_pieces(lambda pieces: pieces.append(pieces[-1])), middle),
    ),
)
