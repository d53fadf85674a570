"""A tiny PipelineModule of DeepSpeed's and a training step of it, as a user of DeepSpeed writes them."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

import pipeproof
from pipeproof.foreign import HandedBack

ROWS, SEQUENCE, WORDS, WIDTH = 2, 4, 16, 8


@dataclass(frozen=True)
class Layout:
    """How a step is laid out, and what it is told."""

    pp: int = 2
    dp: int = 1
    tied: bool = False
    zero: int = 0
    bf16: bool = False
    recompute: int = 0
    clipped: bool = False
    accumulate: str | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.bf16 else None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return made


def logits(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x @ embedding.weight.T


def layers(layout: Layout) -> list[Any]:
    torch.manual_seed(0)
    blocks = [LayerSpec(Block) for _ in range(4)]
    if layout.tied:
        first, last = (TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=one) for one in (None, logits))
    else:
        first, last = LayerSpec(nn.Embedding, WORDS, WIDTH), LayerSpec(nn.Linear, WIDTH, WORDS, bias=False)
    return [first, *blocks, last]


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), labels.flatten())


def made(layout: Layout, microbatches: int) -> PipelineEngine:
    """The engine of this rank."""
    model = PipelineModule(
        layers(layout),
        num_stages=layout.pp,
        loss_fn=loss_fn,
        partition_method="uniform",
        activation_checkpoint_interval=layout.recompute,
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": microbatches,
        "steps_per_print": None,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": layout.zero},
        "bf16": {"enabled": layout.bf16},
        "data_types": {"grad_accum_dtype": layout.accumulate},
        "pipeline": {"use_reentrant": False},  # the first stage's inputs are words, which want no gradient
        "gradient_clipping": 1.0 if layout.clipped else 0.0,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    return engine


def step(layout: Layout, model: nn.Module, microbatches: list[Any]) -> HandedBack:
    deepspeed.init_distributed()
    engine = made(layout, len(microbatches))
    with pipeproof.deepspeed.observed(engine, microbatches, model) as seen:
        train_step(engine, seen.data_iterator)
    return seen.handed_back()


def train_step(engine: PipelineEngine, data: Any) -> None:
    engine.train_batch(data)


def data_of(microbatches: int) -> list[tuple[Tensor, ...]]:
    torch.manual_seed(1)
    return [tuple(torch.randint(0, WORDS, (2, ROWS, SEQUENCE)).unbind()) for _ in range(microbatches)]


def judged(layout: Layout, *, microbatches: int = 4, own_step: Any = step, whitebox: Any = None) -> Any:
    return pipeproof.deepspeed.validate(
        partial(own_step, layout),
        reference=partial(layers, layout),
        microbatches=data_of(microbatches),
        ranks={"pp": layout.pp, "dp": layout.dp},
        loss_fn=loss_fn,
        dtype=layout.dtype,
        whitebox=whitebox,
    )
