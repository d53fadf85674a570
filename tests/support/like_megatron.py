"""A Megatron-core that has what its adapter uses, for what needs no Megatron."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.wings.adapters.megatron_whole import bare
from tests.support.like_framework import install

DATA = [(torch.ones(1, 2), torch.tensor(1.0)), (torch.full((1, 2), 2.0), torch.tensor(3.0))]


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.linear = nn.Linear(2, 2)
        self.attention = nn.Module()
        self.attention.layer_number = number  # type: ignore[assignment]  # a number, as Megatron's has
        self.attention.proj = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.attention.proj(x))


class Chunk(nn.Module):
    """A chunk that holds layers ``first``, ``first + 1`` and so on of the whole model, from 1."""

    def __init__(
        self, first: int = 1, layers: int = 2, *, last: bool = False, tied: bool = False, **config: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(**{"calculate_per_token_loss": False, "pipeline_model_parallel_size": 1} | config)
        self.share_embeddings_and_output_weights = tied
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Layer(first + number) for number in range(layers))
        self.input_tensor: Tensor | None = None
        if last:
            self.decoder.final_layernorm = nn.LayerNorm(2)
            self.output_layer = nn.Linear(2, 2, bias=False)

    def set_input_tensor(self, tensor: Tensor) -> None:
        self.input_tensor = tensor

    def forward(self, x: Tensor | None = None) -> Tensor:
        made = x if self.input_tensor is None else self.input_tensor
        assert made is not None
        for layer in self.decoder.layers:  # type: ignore[union-attr]  # a list of modules
            made = layer(made)
        return made


def forward_step_of_user(data: Any, model: Any) -> tuple[Tensor, Any]:
    inputs, tokens = next(data)
    output = bare(model)(inputs)
    if not bare(model).config.calculate_per_token_loss:
        return output, lambda output: (output.sum(), {})
    return output, lambda output: (output.sum() * tokens, tokens, {})


def forward_step_calc_loss(model: Any, output: Any, function: Any, config: Any, count: int) -> Tensor:
    loss: Tensor = function(output)[0]
    return loss if config.calculate_per_token_loss else loss.div_(count)


def forward_step(function: Any, data_iterator: Any, model: Any, count: int) -> Any:
    output, loss = function(data_iterator, model)
    return sys.modules["megatron.core.pipeline_parallel.schedules"].forward_step_calc_loss(
        model, output, loss, model.config, count
    )


def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it be found for one test."""
    contents: dict[str, dict[str, Any]] = {
        "parallel_state": {
            "_DATA_PARALLEL_GROUP": "the job's",
            "get_pipeline_model_parallel_rank": lambda: 0,
            "get_pipeline_model_parallel_world_size": lambda: 1,
        },
        "pipeline_parallel.schedules": {"forward_step_calc_loss": forward_step_calc_loss, "forward_step": forward_step},
        "tensor_parallel.random": {"_CUDA_RNG_STATE_TRACKER": SimpleNamespace(states_={"model": 3})},
        "utils": {"GlobalMemoryBuffer": object},
    }
    install(monkeypatch, "megatron.core", "0.16.1", contents)
