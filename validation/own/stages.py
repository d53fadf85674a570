"""A model cut into stages: modules of their own, each with copies of its pieces under the model's names."""

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from pipeproof.core.observe.recording import Site
from pipeproof.reference.copies import copies_apart
from pipeproof.reference.model import Model


class Slice(nn.Module):
    """Some layers of a model as a module of its own; its parameters have the names that they have in the model.

    Pieces are copied together, so a weight tied within the slice stays tied, and one tied across slices comes apart.
    """

    def __init__(self, model: Model, layers: range) -> None:
        super().__init__()
        self.pieces = [piece for layer in layers for piece in model.layers[layer]]
        copies = copy.deepcopy([model.get_submodule(piece) for piece in self.pieces])
        for piece, module in zip(self.pieces, copies, strict=True):
            parent: nn.Module = self
            *path, leaf = piece.split(".")
            for name in path:
                if name not in dict(parent.named_children()):
                    parent.add_module(name, nn.Module())
                parent = parent.get_submodule(name)
            parent.add_module(leaf, module)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        for piece in self.pieces:
            outputs = self.get_submodule(piece)(*inputs)
            inputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return inputs[0] if len(inputs) == 1 else inputs


def layers_of(split: Sequence[int]) -> list[range]:
    """The layers of each stage: split (2, 1) is layers 0..1 and layer 2."""
    ends = [sum(split[:stage]) for stage in range(len(split) + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def owners(model: Model, split: Sequence[int]) -> dict[str, int]:
    """The stage of every parameter name, each name of a tied one too."""
    stage_of = {
        piece: stage
        for stage, layers in enumerate(layers_of(split))
        for layer in layers
        for piece in model.layers[layer]
    }
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {name: next(stage for piece, stage in stage_of.items() if name.startswith(f"{piece}.")) for name in names}


def tied_across(model: Model, split: Sequence[int]) -> list[Mapping[int, str]]:
    """The tied parameters whose copies lie in several stages: for each, the name of its copy by stage."""
    return copies_apart(model, owners(model, split))


def parameters_of(modules: Mapping[int, nn.Module]) -> dict[Site, Tensor]:
    """A copy of every parameter of these stages, under each of its names."""
    return {site: _copy(parameter) for site, parameter in _named(modules)}


def gradients_of(modules: Mapping[int, nn.Module]) -> dict[Site, Tensor | None]:
    """A copy of every parameter's gradient, or None where there is none."""
    return {site: None if parameter.grad is None else _copy(parameter.grad) for site, parameter in _named(modules)}


def buffers_of(modules: Mapping[int, nn.Module]) -> dict[Site, Tensor]:
    """A copy of every buffer of these stages."""
    return {(stage, name): _copy(b) for stage, module in modules.items() for name, b in module.named_buffers()}


def _named(modules: Mapping[int, nn.Module]) -> list[tuple[Site, nn.Parameter]]:
    return [
        ((stage, name), parameter)
        for stage, module in modules.items()
        for name, parameter in module.named_parameters(remove_duplicate=False)
    ]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def on_device(model: Model, layers: range, device: str) -> Slice:
    """``layers`` of ``model`` as a stage module on ``device``."""
    return Slice(model, layers).to(torch.device(device))
