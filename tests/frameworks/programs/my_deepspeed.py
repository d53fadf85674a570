import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

WORDS, WIDTH, MICROBATCHES = 64, 16, 4
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": MICROBATCHES,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def logits(embedding, x):
    return x @ embedding.weight.T


def loss_fn(output, labels):
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def build_layers() -> list:
    torch.manual_seed(0)
    first = TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH)
    last = TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=logits)
    return [first, LayerSpec(Block), LayerSpec(Block), LayerSpec(Block), LayerSpec(Block), last]


def setup(pp: int):
    deepspeed.init_distributed()
    model = PipelineModule(build_layers(), num_stages=pp, loss_fn=loss_fn)
    return deepspeed.initialize(model=model, config=CONFIG, model_parameters=model.parameters())[0]
