"""Cut a model into stages: modules with copied pieces under model names."""

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor, nn

from pipeproof.core.observe.recording import Site
from pipeproof.reference.copies import copies_apart
from pipeproof.reference.model import Model


class Slice(nn.Module):
    """Some model layers as a module, with the model's parameter names.

    Pieces are copied together, so a weight tied within the slice stays tied, while one tied across slices separates.
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
    """Return each stage's layers: split (2, 1) gives layers 0..1, and layer 2."""
    ends = [sum(split[:stage]) for stage in range(len(split) + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def owners(model: Model, split: Sequence[int]) -> dict[str, int]:
    """Return the stage for each parameter name, tied names included."""
    stage_of = {
        piece: stage
        for stage, layers in enumerate(layers_of(split))
        for layer in layers
        for piece in model.layers[layer]
    }
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {name: next(stage for piece, stage in stage_of.items() if name.startswith(f"{piece}.")) for name in names}


def tied_across(model: Model, split: Sequence[int]) -> list[Mapping[int, str]]:
    """Return tied parameters with copies in several stages: names by stage."""
    return copies_apart(model, owners(model, split))


def parameters_of(modules: Mapping[int, nn.Module]) -> dict[Site, Tensor]:
    """Copy the stages' parameters, under all names."""
    return {site: _copy(parameter) for site, parameter in _name_parameters(modules)}


def gradients_of(modules: Mapping[int, nn.Module]) -> dict[Site, Tensor | None]:
    """Copy the stages' gradients, or None."""
    return {
        site: None if parameter.grad is None else _copy(parameter.grad) for site, parameter in _name_parameters(modules)
    }


def buffers_of(modules: Mapping[int, nn.Module]) -> dict[Site, Tensor]:
    """Copy the stages' buffers."""
    return {(stage, name): _copy(b) for stage, module in modules.items() for name, b in module.named_buffers()}


def _name_parameters(modules: Mapping[int, nn.Module]) -> list[tuple[Site, nn.Parameter]]:
    return [
        ((stage, name), parameter)
        for stage, module in modules.items()
        for name, parameter in module.named_parameters(remove_duplicate=False)
    ]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
