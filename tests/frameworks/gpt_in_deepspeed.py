"""The tiny GPTModel of Megatron's, layer by layer in a PipelineModule of DeepSpeed's: one model, two frameworks."""

from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

import pipeproof
from pipeproof.wings.adapters.deepspeed import as_launched
from pipeproof.wings.adapters.megatron import Megatron
from pipeproof.wings.adapters.megatron_whole import pretend_alone
from pipeproof.worlds.worker import RankContext
from tests.frameworks import gpt_job
from tests.frameworks.engines import tiny_gpt
from tests.frameworks.engines.megatron_layout import MegatronLayout as Layout

MICROBATCHES = 4


class Words(nn.Module):
    def __init__(self, gpt: Any) -> None:
        super().__init__()
        self.embedding = gpt.embedding

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        made: Tensor = self.embedding(input_ids=tokens, position_ids=positions)
        return made


class Layer(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(1, 1, len(x), len(x), dtype=torch.bool).triu(1)
        made: Tensor = self.layer(x, mask)[0]
        return made


class Head(nn.Module):
    def __init__(self, gpt: Any) -> None:
        super().__init__()
        self.norm, self.output_layer = gpt.decoder.final_layernorm, gpt.output_layer

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.output_layer(self.norm(x))[0]
        return made


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.transpose(0, 1).flatten(0, 1), labels.flatten())


def data() -> list[tuple[Tensor, ...]]:
    return [(*one[:2], torch.ones_like(one[2])) for one in tiny_gpt.data_of(MICROBATCHES)]


def whole() -> Any:
    """The GPTModel on one rank, as a reference holds it."""
    made: Any = nn.Module()
    with pretend_alone():
        made.model = tiny_gpt.provided(Layout(pp=1))
    torch.manual_seed(2)
    with torch.no_grad():  # as after some steps: names are told by weights, and norms all begin with ones
        for parameter in made.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    return made


def in_megatron(_: RankContext, path: str) -> str:
    """Record a step of Megatron's own pipeline."""
    with gpt_job.job_of(Layout()) as job:
        chunks, optimizer = job.made
        own = Megatron(chunks)
        own.load(own.step(), (), whole())
        with pipeproof.megatron.record_step(chunks, optimizer, [one[:2] for one in data()], path) as observed:
            job.train(data())
        return observed.problem


def in_deepspeed(_: RankContext, path: str, factor: float) -> str:
    """Record a step of DeepSpeed's pipeline; its loss is ``factor`` times what it should be."""
    gpt = whole().model
    layers = [Words(gpt), *map(Layer, gpt.decoder.layers), Head(gpt)]
    config = {
        "train_micro_batch_size_per_gpu": tiny_gpt.ROWS,
        "gradient_accumulation_steps": MICROBATCHES,
        "steps_per_print": None,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},  # Megatron's job has no optimizer either
        "pipeline": {"use_reentrant": False},
    }
    with as_launched("cpu"), pretend_alone():
        deepspeed.init_distributed()
        model = PipelineModule(layers, num_stages=2, loss_fn=partial(scaled, factor), partition_method="uniform")
        engine, *_rest = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        pairs = [one[:2] for one in data()]
        with pipeproof.deepspeed.record_step(engine, pairs, path) as observed:
            engine.train_batch(iter(pairs))
    return observed.problem


def scaled(factor: float, logits: Tensor, labels: Tensor) -> Tensor:
    return loss_fn(logits, labels) * factor
