"""Faults of the model: a stage computes differently, holds wrong layers, or draws wrong random numbers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType

import torch
from torch import Tensor, nn

from pipeproof.own.faults import Plant
from pipeproof.own.stages import Slice
from pipeproof.reference.model import HEADS, Attention, DropoutBlock
from pipeproof.wings.specimens.planting import NORMS, Call, Changes, Edit, middle, on_modules, on_parts, on_stages
from pipeproof.wings.specimens.specimen import Entry


def with_forward(kind: type[nn.Module], forward: Callable[..., object], *, most: int | None = None) -> Edit:
    """Replace ``forward`` of all blocks, or the first ``most``, of a kind."""
    return on_parts((kind,), lambda block, number: setattr(block, "forward", MethodType(forward, block)), most=most)


def attend(self: Attention, x_BTC: Tensor, parts_BTC: Sequence[Tensor], *, causal: bool = True) -> Tensor:
    """Apply attention ``self`` to queries, keys and values."""
    b, t, c = x_BTC.shape
    query, key, value = (part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in parts_BTC)  # (B, H, T, C/H)
    mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    y_BTC: Tensor = self.out(mixed.transpose(1, 2).reshape(b, t, c))
    return y_BTC


def with_value(derived: Tensor, value: Tensor) -> Tensor:
    """Combine one tensor's derivative with another's value."""
    mixed = derived.clone()
    mixed.data.copy_(value)
    return mixed


def _on_dropout(change: Callable[[DropoutBlock, int], object]) -> Plant:
    return on_modules(on_parts((DropoutBlock,), change), middle)


def _recompute(self: DropoutBlock, x_BC: Tensor, key: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """Run the block's forward; its backward recomputes it with a fresh mask."""
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


def _on_pieces(change: Callable[[list[str]], object]) -> Edit:
    """Change the stage's layers."""

    def changed(module: nn.Module) -> None:
        assert isinstance(module, Slice), "stages here are slices of a model"
        change(module.pieces)

    return changed


PLANTS: Mapping[str, Plant | Entry] = {
    "layers-counted-from-zero": _on_dropout(lambda block, number: setattr(block, "layer", number)),
    "dropout-other-seed": _on_dropout(lambda block, number: setattr(block, "seed", block.seed + 1)),
    "recomputed-with-fresh-mask": on_modules(with_forward(DropoutBlock, _recompute), middle),
    "weights-of-other-seed": on_modules(_reseed, middle),
    "side-input-missing": on_stages(
        Changes(inputs=lambda inputs, call: (inputs[0], torch.zeros_like(inputs[1]))), middle
    ),
    "mask-missing": on_modules(
        with_forward(Attention, lambda own, x_BTC: attend(own, x_BTC, own.qkv(x_BTC).chunk(3, -1), causal=False)),
        middle,
    ),
    "other-epsilon": on_modules(on_parts(NORMS, lambda norm, number: setattr(norm, "eps", 1e-2)), middle),
    "stage-in-bf16": on_stages(Changes(during=_under_autocast), middle),
    "layers-in-other-order": on_modules(_on_pieces(lambda pieces: pieces.reverse()), middle),
    "layer-skipped": on_modules(_on_pieces(lambda pieces: pieces.pop()), middle),
    "layer-repeated": on_modules(_on_pieces(lambda pieces: pieces.append(pieces[-1])), middle),
}
