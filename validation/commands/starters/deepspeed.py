"""DeepSpeed's pipeline engine, beside the same layers on one device.

It needs deepspeed: pip install deepspeed==0.19.8

It runs as it is: toy layers, and 1F1B on two ranks. Change what is marked CHANGE; the rest may stay.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pipeproof import deepspeed as checked
from pipeproof.whitebox import WhiteBox

with checked.imports():  # your own modules that import deepspeed belong here, too
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

RANKS, MICROBATCHES = 2, 4
loss_fn = nn.functional.mse_loss
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": MICROBATCHES,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def build_layers() -> list[Any]:
    """CHANGE 1: the layers, as PipelineModule takes them. Two calls must give the same weights."""
    torch.manual_seed(0)
    return [one for _ in range(4) for one in (LayerSpec(nn.Linear, 16, 16), LayerSpec(nn.Tanh))]


def microbatches() -> list[tuple[Tensor, Tensor]]:
    """CHANGE 2: the data, as (inputs, labels) of each microbatch."""
    torch.manual_seed(1)
    return [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(MICROBATCHES)]


def setup() -> Any:
    """CHANGE 3: your engine."""
    deepspeed.init_distributed()
    model = PipelineModule(build_layers(), num_stages=RANKS, loss_fn=loss_fn)
    return deepspeed.initialize(model=model, config=CONFIG, model_parameters=model.parameters())[0]


def my_step(layers: Any, microbatches: list[tuple[Tensor, Tensor]]) -> Any:
    """The step that is judged, on every rank."""
    engine = setup()
    with checked.observe(engine, microbatches, layers) as observed:
        engine.train_batch(observed.data_iterator)
    return observed.result()


def test_my_pipeline(whitebox: WhiteBox) -> None:
    """Fails, with the cause, where a loss or a gradient is not that of one device."""
    verdict = checked.validate(
        my_step, reference=build_layers, microbatches=microbatches(), ranks=RANKS, loss_fn=loss_fn, whitebox=whitebox
    )
    verdict.raise_if_failed()
