"""Faults of the model: a stage computes something else, holds other layers, or draws other random numbers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType

import torch
from torch import Tensor, nn

from pipeproof.cases.specimens.planting import NORMS, Call, Change, Changes, middle, on_modules, on_parts, on_stages
from pipeproof.cases.specimens.specimen import Fault, Needs, Plant, Specimen
from pipeproof.cases.stages import Slice
from pipeproof.reference.model import HEADS, Attention, DropoutBlock

_DROPOUT = Needs(models=("dropout",))
_LAYERS = Needs(layers=2, models=("mlp", "twice", "batchnorm"))


def with_forward(kind: type[nn.Module], forward: Callable[..., object], *, most: int | None = None) -> Change:
    """The blocks of a kind, or the first ``most`` of them, compute ``forward``."""
    return on_parts((kind,), lambda block, number: setattr(block, "forward", MethodType(forward, block)), most=most)


def attended(self: Attention, x_BTC: Tensor, parts_BTC: Sequence[Tensor], *, causal: bool = True) -> Tensor:
    """What ``self`` makes of queries, keys and values."""
    b, t, c = x_BTC.shape
    query, key, value = (part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in parts_BTC)  # (B, H, T, C/H)
    mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    y_BTC: Tensor = self.out(mixed.transpose(1, 2).reshape(b, t, c))
    return y_BTC


def with_value(derived: Tensor, value: Tensor) -> Tensor:
    """One tensor's derivative with another's value."""
    mixed = derived.clone()
    mixed.data.copy_(value)
    return mixed


def _blind_to_order(self: Attention, x_BTC: Tensor) -> Tensor:
    """Every token sees every other one."""
    return attended(self, x_BTC, self.qkv(x_BTC).chunk(3, dim=-1), causal=False)


def _on_dropout(change: Callable[[DropoutBlock, int], object]) -> Plant:
    return on_modules(on_parts((DropoutBlock,), change), middle)


def _recomputed(self: DropoutBlock, x_BC: Tensor, key: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """The block's forward, whose backward computes it again with a fresh mask."""
    right, fresh = DropoutBlock.forward(self, x_BC, key), DropoutBlock.forward(self, x_BC, key + 1)
    if isinstance(right, Tensor) and isinstance(fresh, Tensor):
        return with_value(fresh, right)
    return with_value(fresh[0], right[0]), key


def _reseed(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.empty(parameter.shape).normal_(std=0.1, generator=generator))


def _under_autocast(call: Call) -> AbstractContextManager[object]:
    device = next(call.stage.module.parameters()).device
    return torch.autocast(device.type, torch.bfloat16)


def _on_pieces(change: Callable[[list[str]], object]) -> Change:
    """Changes the layers that a stage has."""

    def changed(module: nn.Module) -> None:
        assert isinstance(module, Slice), "stages here are slices of a model"
        change(module.pieces)

    return changed


SPECIMENS: Mapping[str, Specimen] = {
    "layers-counted-from-zero": Specimen(
        summary="a stage numbers its layers from 0, so what depends on a layer's number is wrong",
        origin="NVIDIA/Megatron-LM 0504e973",
        classes=("mK",),
        fault=Fault("randomness", "loss", stage=middle, alike=("computation", "partition")),
        needs=Needs(stages=2, models=("dropout",)),
        plant=_on_dropout(lambda block, number: setattr(block, "layer", number)),
    ),
    "dropout-other-seed": Specimen(
        summary="one stage draws its dropout masks from another seed",
        origin="pytorch/pytorch#55036; pytorch/pytorch#139304",
        classes=("tH", "tJ"),
        fault=Fault("randomness", "loss", stage=middle, alike=("computation",)),
        needs=_DROPOUT,
        plant=_on_dropout(lambda block, number: setattr(block, "seed", block.seed + 1)),
    ),
    "recomputed-with-fresh-mask": Specimen(
        summary="a recomputed forward draws a fresh dropout mask: the loss is right, the gradient another function's",
        origin="allenai/OLMo-core#828",
        classes=("tH",),
        fault=Fault("randomness", "gradient", stage=middle, alike=("computation",)),
        needs=_DROPOUT,
        plant=on_modules(with_forward(DropoutBlock, _recomputed), middle),
    ),
    "weights-of-other-seed": Specimen(
        summary="one stage draws its initial weights from a seed of its own",
        origin="pytorch/torchtitan#514; pytorch/pytorch#139304",
        classes=("tJ",),
        fault=Fault("randomness", "loss", stage=middle, alike=("computation", "partition")),
        plant=on_modules(_reseed, middle),
    ),
    "side-input-missing": Specimen(
        summary="a middle stage is given no side input",
        origin="AMD-AGI/Primus#277; NVIDIA-NeMo/Megatron-Bridge#3926",
        classes=("tG", "mJ"),
        fault=Fault("altered", "loss", stage=middle, alike=("randomness", "computation", "zero")),
        needs=_DROPOUT,
        plant=on_stages(Changes(inputs=lambda inputs, call: (inputs[0], torch.zeros_like(inputs[1]))), middle),
    ),
    "mask-missing": Specimen(
        summary="attention on one stage is not causal",
        origin="pytorch/torchtitan#1723: masks under microbatches",
        classes=("tG",),
        fault=Fault("computation", "loss", stage=middle),
        needs=Needs(models=("gpt", "gpt-tied")),
        plant=on_modules(with_forward(Attention, _blind_to_order), middle),
    ),
    "other-epsilon": Specimen(
        summary="norms on one stage were built with another epsilon",
        origin="the class of options that reach some stages only (NVIDIA/Megatron-LM#4641)",
        classes=("mK",),
        fault=Fault("computation", "loss", stage=middle),
        plant=on_modules(on_parts(NORMS, lambda norm, number: setattr(norm, "eps", 1e-2)), middle),
    ),
    "stage-in-bf16": Specimen(
        summary="one stage computes under autocast, the others do not",
        origin="pytorch/pytorch#116183",
        classes=("tH",),
        fault=Fault("computation", "loss", stage=middle, alike=("rounded",)),
        plant=on_stages(Changes(during=_under_autocast), middle),
    ),
    "layers-in-other-order": Specimen(
        summary="the layers of one stage run in the wrong order",
        origin="NVIDIA/Megatron-LM 0504e973 and the class of wrong layer offsets",
        classes=("mK",),
        fault=Fault("computation", "loss", stage=middle),
        needs=_LAYERS,
        plant=on_modules(_on_pieces(lambda pieces: pieces.reverse()), middle),
    ),
    "layer-skipped": Specimen(
        summary="the last layer of a stage is nobody's",
        origin="arXiv 2506.09280, its class of wrong stage divisions",
        classes=("mK",),
        fault=Fault("computation", "presence", stage=middle, alike=("missing",)),
        needs=_LAYERS,
        plant=on_modules(_on_pieces(lambda pieces: pieces.pop()), middle),
    ),
    "layer-repeated": Specimen(
        summary="the last layer of a stage runs twice",
        origin="arXiv 2506.09280, its class of wrong stage divisions",
        classes=("mK",),
        fault=Fault("computation", "loss", stage=middle),
        needs=_LAYERS,
        plant=on_modules(_on_pieces(lambda pieces: pieces.append(pieces[-1])), middle),
    ),
}
