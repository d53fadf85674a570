"""A tiny PipelineModule of DeepSpeed's and a training step of it, as a user of DeepSpeed writes them."""

from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from pipeproof import StepResult
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.adapters import deepspeed as adapter
from pipeproof.wings.adapters.deepspeed import DEEPSPEED
from tests.frameworks.engines.deepspeed_layout import DeepSpeedLayout
from tests.frameworks.engines.groups import groups_given_back

ROWS, SEQUENCE, WORDS, WIDTH = 2, 4, 16, 8


class Block(nn.Module):
    """A layer of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Rows x words x width, in and out."""
        made: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return made


def logits(embedding: nn.Embedding, x: Tensor) -> Tensor:
    """The last layer, where it is the first once more."""
    return x @ embedding.weight.T


def layers(layout: DeepSpeedLayout) -> list[Any]:
    """As a PipelineModule is given them."""
    torch.manual_seed(layout.seed)
    blocks = [LayerSpec(Block) for _ in range(layout.layers)]
    if layout.tied:
        first, last = (TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=one) for one in (None, logits))
    else:
        first, last = LayerSpec(nn.Embedding, WORDS, WIDTH), LayerSpec(nn.Linear, WIDTH, WORDS, bias=False)
    return [first, *blocks, last]


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    """Of a microbatch, a mean."""
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), labels.flatten())


def made(layout: DeepSpeedLayout, microbatches: int) -> PipelineEngine:
    """The engine of this rank."""
    model = PipelineModule(
        layers(layout),
        num_stages=layout.pp,
        loss_fn=loss_fn,
        partition_method=layout.partition,
        activation_checkpoint_interval=layout.recompute,
        checkpointable_layers=["Block"] if layout.blocks_alone else None,
        dynamic_shape=layout.dynamic,
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": microbatches,
        "steps_per_print": None,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": zero_of(layout),
        "bf16": {"enabled": layout.bf16},
        "data_types": {"grad_accum_dtype": None if layout.accumulate == "none" else layout.accumulate},
        "pipeline": {"use_reentrant": layout.reentrant},
        "prescale_gradients": layout.prescaled,
        "gradient_clipping": 1.0 if layout.clipped else 0.0,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    return engine


def zero_of(layout: DeepSpeedLayout) -> dict[str, Any]:
    """What the engine is told of ZeRO."""
    told: dict[str, Any] = {"stage": layout.zero}
    if layout.zero:
        told |= {
            "reduce_scatter": not layout.whole,
            "overlap_comm": layout.overlap,
            "contiguous_gradients": not layout.scattered,
        }
    return told | ({"reduce_bucket_size": layout.bucket} if layout.bucket else {})


def step(layout: DeepSpeedLayout, model: nn.Module, microbatches: list[Any]) -> StepResult:
    """The batch that is judged, on this rank."""
    with groups_given_back():
        deepspeed.init_distributed()
        engine = made(layout, len(microbatches))
        if layout.second:
            DEEPSPEED.load(engine.module.named_parameters(), model)  # what a verdict is about begins here
            train_step(engine, iter(microbatches))
        with adapter.observe(engine, microbatches, model) as observed:
            train_step(engine, observed.data_iterator)
        return observed.result()


def train_step(engine: PipelineEngine, data: Any) -> None:
    """A whole batch."""
    engine.train_batch(data)


def data_of(microbatches: int, seed: int = 0) -> list[tuple[Tensor, ...]]:
    """Words, and those that are to follow."""
    torch.manual_seed(seed + 1)
    return [tuple(torch.randint(0, WORDS, (2, ROWS, SEQUENCE)).unbind()) for _ in range(microbatches)]


def judged(
    layout: DeepSpeedLayout, *, microbatches: int = 4, own_step: Any = step, whitebox: WhiteBox | None = None
) -> Verdict:
    """The verdict on a batch of so many microbatches, those of all replicas."""
    return adapter.validate(
        partial(own_step, layout),
        reference=partial(layers, layout),
        microbatches=data_of(microbatches, layout.seed),
        ranks={"pp": layout.pp, "dp": layout.dp},
        loss_fn=loss_fn,
        dtype=torch.bfloat16 if layout.bf16 else None,
        whitebox=whitebox,
    )
