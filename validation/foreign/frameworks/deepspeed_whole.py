"""The reference of a step of DeepSpeed's PipelineEngine: the same layers on one rank, one after the other."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.foreign.frameworks.framework import Framework, form
from pipeproof.foreign.task import WhiteBoxError


class DeepSpeedError(WhiteBoxError):
    """DeepSpeed is missing, of a version that is not known, or used in a way that is not covered."""


DEEPSPEED = Framework(
    "deepspeed", "deepspeed", "pipeproof.deepspeed", ("0.19",), "pip install deepspeed==0.19.8", DeepSpeedError
)


class WholeDeepSpeed(nn.Module):
    """All layers, as ``build`` gives them to a PipelineModule, with the names that they have in one."""

    def __init__(self, build: Callable[[], Iterable[Any]], dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        layers = DEEPSPEED.built(build)
        if not isinstance(layers, Iterable):
            raise DeepSpeedError(
                f"the reference is a {type(layers).__name__}: expected layers as PipelineModule is given"
            )
        self._calls = [self._made(str(number), layer) for number, layer in enumerate(layers)]
        if dtype is not None:
            self.to(dtype)
        DEEPSPEED.check_dropout(self, what="layer ")

    def _made(self, name: str, layer: Any) -> Callable[[Any], Any]:
        """What to call for ``layer``, which is a module, the specification of one, or a function."""
        if isinstance(layer, nn.Module):
            self.add_module(name, layer)
            return layer
        pipe = DEEPSPEED.module("pipe")
        if isinstance(layer, pipe.TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            tied = self.tied_modules[layer.key]
            return tied if layer.forward_fn is None else partial(layer.forward_fn, tied)
        if isinstance(layer, pipe.LayerSpec):
            made: nn.Module = layer.build()
            self.add_module(name, made)
            return made
        if not callable(layer):
            raise DeepSpeedError(
                f"layer {name} is a {type(layer).__name__}: expected a module, a LayerSpec or a function"
            )
        return layer  # type: ignore[no-any-return]  # a function of the user's

    def forward(self, *inputs: Tensor) -> Any:
        made: Any = inputs[0] if len(inputs) == 1 else inputs
        for call in self._calls:
            made = call(made)
        return made


def loss_of_layers(output: Any, _: Any) -> Tensor:
    """For layers that give the loss themselves. Raises ``DeepSpeedError`` where they do not."""
    if not isinstance(output, Tensor) or output.numel() != 1:
        found = f"a tensor of {form(output)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise DeepSpeedError(f"the last layer gives {found}, and no loss: pass the PipelineModule's loss_fn")
    return output
