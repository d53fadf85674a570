"""A step by hand in which two ranks have each layer together, whole tensors between layers; and what may go wrong."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeproof import StepResult, watch

WIDTH, COUNT = 16, 4
loss_fn = nn.functional.mse_loss
Microbatch = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class SummedBack(torch.autograd.Function):
    """Nothing, whose gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        whole = given[0].contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class Summed(torch.autograd.Function):
    """The sum of what all ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        whole = x.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        return given[0], None


class Half(Block):
    """A rank's half of a block; ``early``: by how many rows its part of ``up`` begins too early."""

    def __init__(self, whole: Block, group: Any, *, early: int = 0) -> None:
        super().__init__()
        self.group, length = group, 32 // group.size()
        first = length * group.rank()
        self.at = slice(first, first + length)
        self.norm = whole.norm
        self.up.weight = nn.Parameter(whole.up.weight.data[first - early : first - early + length].clone())
        self.up.bias = nn.Parameter(whole.up.bias.data[self.at].clone())
        self.down.weight = nn.Parameter(whole.down.weight.data[:, self.at].clone())
        self.down.bias = whole.down.bias

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.up(SummedBack.apply(self.norm(x), self.group)))  # type: ignore[no-untyped-call]
        whole: Tensor = Summed.apply(nn.functional.linear(made, self.down.weight), self.group)  # type: ignore[no-untyped-call]
        return x + whole + self.down.bias

    @property
    def gradients(self) -> dict[nn.Parameter, Any]:
        cut = {self.up.weight: self.at, self.up.bias: self.at, self.down.weight: (slice(0, WIDTH), self.at)}
        return {one: (one.grad, cut[one]) if one in cut else one.grad for one in self.parameters()}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def microbatches(count: int = COUNT) -> list[Microbatch]:
    torch.manual_seed(1)
    return [(torch.randn(6, WIDTH), torch.randn(6, WIDTH)) for _ in range(count)]


@dataclass(frozen=True)
class Planted:
    """What goes wrong, by the rank: ``given`` changes its microbatches, ``times`` by what a loss is multiplied.

    ``begun`` changes its layers before the step, ``sent`` what it hands to the other stage, ``done`` its gradients.
    """

    early: int = 0
    given: Callable[[int, Sequence[Microbatch]], Sequence[Microbatch]] = lambda rank, every: every
    times: Callable[[int, int], float] = lambda rank, microbatch: 1.0
    begun: Callable[[int, nn.Sequential], None] = lambda rank, layers: None
    sent: Callable[[int, int, Tensor], Tensor] = lambda rank, microbatch, tensor: tensor
    done: Callable[[int, nn.Sequential], None] = lambda rank, layers: None


def step(
    model: nn.Sequential, microbatches: Sequence[Microbatch], *, ranks: dict[str, int], planted: Planted
) -> StepResult:
    """All forwards, then all backwards, of this rank's stage where ``ranks`` has the axis pp; dp and tp as well."""
    mesh, rank = init_device_mesh("cpu", tuple(ranks.values()), mesh_dim_names=tuple(ranks)), dist.get_rank()
    own = model[mesh.get_local_rank("pp") :][:1] if "pp" in ranks else model
    layers = nn.Sequential(
        *(Half(one, mesh.get_group("tp"), early=planted.early * mesh.get_local_rank("tp")) for one in own)
    )
    planted.begun(rank, layers)
    run = _piped if "pp" in ranks else _accumulated
    losses = run(watch(layers), planted.given(rank, microbatches), mesh, planted)
    for parameter in layers.parameters() if "dp" in ranks else ():
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= mesh["dp"].size()
    planted.done(rank, layers)
    return StepResult(layers, losses or None, gradients={k: v for one in layers for k, v in one.gradients.items()})


def _accumulated(stage: nn.Module, every: Sequence[Microbatch], mesh: DeviceMesh, planted: Planted) -> list[float]:
    losses = []
    for number, (x, target) in enumerate(every):
        loss = loss_fn(stage(x), target)
        (loss * planted.times(dist.get_rank(), number) / len(every)).backward()
        losses.append(loss.item())
    return losses


def _piped(stage: nn.Module, every: Sequence[Microbatch], mesh: DeviceMesh, planted: Planted) -> list[float]:
    """Two stages."""
    group, rank = mesh.get_group("pp"), dist.get_rank()
    other = dist.get_global_rank(group, 1 - group.rank())
    came, made, losses = [], [], []
    for number, (x, target) in enumerate(every):
        if group.rank():
            came.append(torch.empty_like(target))
            dist.recv(came[-1], other)
            loss = loss_fn(stage(came[-1].requires_grad_()), target)
            losses.append(loss.item())
            made.append(loss * planted.times(rank, number) / len(every))
        else:
            made.append(stage(x))
            dist.send(planted.sent(rank, number, made[-1].detach()), other)
    for number, one in enumerate(made):
        if group.rank():
            one.backward()
            gradient = came[number].grad
            assert gradient is not None
            dist.send(planted.sent(rank, number, gradient), other)
        else:
            gradient = torch.empty_like(one)
            dist.recv(gradient, other)
            one.backward(gradient)
    return losses
