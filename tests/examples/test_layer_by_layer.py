"""An example of a model that no device has whole: two neighbouring layers at a time are validated."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipeproof.foreign import WhiteBox, Window, watch


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def my_step(model: Window, microbatches: list) -> tuple:
    mesh, losses = init_device_mesh("cpu", (2,)), []
    stages = [watch(layer) for layer in model]
    for layer in stages:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for x, target in microbatches:
        loss = model.loss_fn(model(x), target)
        (loss / len(microbatches)).backward()
        losses.append(loss.item())
    return stages, losses


def test_layer_by_layer(whitebox: WhiteBox) -> None:
    torch.manual_seed(1)
    data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(4)]
    layers = [partial(Block, seed) for seed in range(6)]
    more = {"microbatches": data, "ranks": {"tp": 2}, "loss_fn": nn.functional.mse_loss}
    for verdict in whitebox.layerwise(my_step, layers=layers, **more):
        verdict.raise_if_failed()
