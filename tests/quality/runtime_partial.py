"""The functional pipeline of two stages with tensor parallelism by hand: each rank has half of the hidden units.

Where nobody adds up what the halves give for their input, a part of a gradient crosses the boundary.
"""

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from runtime_functional import Line, Way
from runtime_functional_training import with_pads
from torch import Tensor, nn
from truth_models import WIDTH, Chain, Pairs, observed

from pipeproof import StepResult
from tests.support.tensor_parallel import Summed, SummedBack


class Wide(nn.Module):
    """down(tanh(up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.tanh(self.up(x)))


class Half(nn.Module):
    """This rank's half of the hidden units of a ``Wide``."""

    def __init__(self, whole: Wide, own: slice, group: Any, summed: bool) -> None:
        super().__init__()
        self.own, self.group, self.summed = own, group, summed
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.up.weight.copy_(whole.up.weight[own])
            self.up.bias.copy_(whole.up.bias[own])
            self.down.weight.copy_(whole.down.weight[:, own])
            self.down.bias.copy_(whole.down.bias)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.up(SummedBack.apply(x, self.group) if self.summed else x))
        return Summed.apply(nn.functional.linear(h, self.down.weight), self.group) + self.down.bias


def step(model: Any, pairs: Pairs, *, way: Way, summed: bool, watched: bool, alone: bool = False) -> StepResult:
    """One step of two stages, each on two ranks; ``summed``: what the last stage sends back is whole.

    ``alone``: the last stage hands back gradients without its module.
    """
    rank = dist.get_rank()
    group = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    own = slice(WIDTH * (rank % 2), WIDTH * (rank % 2 + 1))
    layers = model[2 * (rank // 2) :][:2]
    # Only of a stage's first layer does the gradient cross its boundary.
    halves = [Half(layer, own, group, bool(k) or summed) for k, layer in enumerate(layers)]
    stage = observed(Chain(OrderedDict(zip(layers._modules, halves, strict=True))), watched)
    weights = {n: p.detach().clone() for n, p in stage.named_parameters()}
    line = Line(way, (stage,), (weights,), ({},), with_pads(pairs, (), 0, 0.0), [rank % 2, rank % 2 + 2])
    (sums,), losses = line.run(({},))
    index = {"up.weight": own, "up.bias": own, "down.weight": (slice(None), own)}
    parts = {n: (g, index[n.partition(".")[2]]) if n.partition(".")[2] in index else g for n, g in sums.items()}
    return StepResult([] if alone and rank >= 2 else [stage], losses or None, gradients=parts)
