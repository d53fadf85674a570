"""A step by hand of as many stages as there are ranks, each of a few tensors, held against itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from pipeproof import StageByStage, check_step
from pipeproof.core.verdict import Verdict
from pipeproof.worlds.worker import RankContext

WIDTH, ROWS, COUNT = 8, 4, 3


class Both(nn.Module):
    """Of any number of tensors as many, each of all of them; ``plain``: it has no parameters.

    ``second``: what it gives as its second, of its second input.
    """

    def __init__(self, *, plain: bool = False, second: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layer, self.second = nn.Identity() if plain else nn.Linear(WIDTH, WIDTH), second

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        whole = self.layer(sum((k + 1) * one for k, one in enumerate(given)))
        made = tuple(torch.tanh(whole / (k + 1)) for k in range(len(given)))
        return made if self.second is None else (made[0], self.second(given[1].detach()))


def loss_fn(outputs: Sequence[Tensor], target: Tensor) -> Tensor:
    return torch.stack([(one - target).square().mean() for one in outputs]).sum()


@dataclass(frozen=True)
class Chained:
    """How a chain is run. ``build`` makes a rank's stage, ``given`` are what it is called with, of what it has.

    ``wants``: whether a rank's message wants a gradient. ``inputs``: how many tensors each microbatch brings.
    ``scale``: what a rank's losses are multiplied by, and its gradients divided by, before its optimizer takes a step.
    ``far``: what targets are multiplied by. ``labels``: the last input of each microbatch is its target.
    ``wants_first``: the first stage's inputs want a gradient, too, as words that were looked up before do.
    """

    build: Callable[[int], nn.Module] = lambda rank: Both()
    given: Callable[[int, list[Tensor]], list[Tensor]] = lambda rank, tensors: tensors
    wants: Callable[[int], bool] = lambda rank: True
    inputs: int = 1
    scale: Callable[[int], float] | None = None
    far: float = 1.0
    labels: bool = False
    wants_first: bool = False


def data(way: Chained) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    draw = torch.Generator().manual_seed(7)

    def drawn() -> Tensor:
        return torch.randn(ROWS, WIDTH, generator=draw)

    drawn_ones = [(tuple(drawn() for _ in range(way.inputs)), drawn() * way.far) for _ in range(COUNT)]
    return [((*inputs[:-1], target) if way.labels else inputs, target) for inputs, target in drawn_ones]


def chain_step(context: RankContext, way: Chained) -> Verdict:
    """The verdict on one step, forward and backward of one microbatch after the other."""
    rank, last = context.rank, context.ranks - 1
    torch.manual_seed(rank)
    stage = way.build(rank)
    scale = 0.0 if way.scale is None else way.scale(rank)
    scaler = GradScaler("cpu", init_scale=scale, enabled=scale > 0)
    scaler.scale(torch.zeros(()))  # on ranks without a loss, too
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1) if scale else None
    by = StageByStage(loss_fn, optimizer=optimizer, scaler=scaler if scale else None)
    with check_step(stage, data(way), against=by, rename="{}.{}".format, timeout_s=20) as check:
        for inputs, target in data(way):
            inputs = tuple(one.requires_grad_(way.wants_first) for one in inputs)
            held = list(inputs) if not rank else [_received(rank - 1, way.wants(rank)) for _ in inputs]
            outputs = stage(*way.given(rank, held))
            if rank == last:
                scaler.scale(loss_fn(outputs, target) / COUNT).backward()
            else:
                for one in outputs:
                    dist.send(one.detach(), rank + 1)
                flows = [_received(rank + 1, False) for _ in outputs]
                pairs = [pair for pair in zip(outputs, flows, strict=True) if pair[0].requires_grad]
                if pairs:
                    torch.autograd.backward(*zip(*pairs, strict=True))
            for one in held if rank else ():
                dist.send(torch.zeros_like(one) if one.grad is None else one.grad, rank - 1)
        if optimizer is not None:
            scaler.unscale_(optimizer)
        check.gradients()
        if optimizer is not None:
            scaler.step(optimizer)
            scaler.update()
        check.report()
    return check.verdict


def _received(source: int, wants: bool) -> Tensor:
    message = torch.empty(ROWS, WIDTH)
    dist.recv(message, source)
    return message.requires_grad_(wants)
