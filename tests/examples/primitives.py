"""One kind of parallelism inside a stage at a time, on two ranks, and one stack on eight. ``fault`` plants a bug.

Tensor and sequence parallelism are torch's own. Experts and parts of a sequence are exchanged by hand.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pipeproof import PipelineSchedule
from pipeproof.foreign import watch

WIDTH, EXPERTS, SEQUENCE = 16, 4, 8
loss_fn = nn.functional.mse_loss


def inner() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def dense_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def colwise_and_rowwise(block: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(block, mesh, {"inner.0": ColwiseParallel(), "inner.2": RowwiseParallel()})


def tensor_parallel(model: Any, microbatches: list, *, fault: str = "") -> tuple:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for block in model:
        colwise_and_rowwise(block, mesh)
    if fault == "mean for sum":  # of what the ranks hand back of a branch; the residual stream beside it stays right
        model[1].norm.register_forward_hook(lambda _, __, out: out.register_hook(lambda g: g / 2) and None)
    result = steps(watch(model), microbatches)
    if fault == "bias on each":  # the bias of a row-wise layer is added on every rank, and so is its gradient
        for block in model:
            block.inner[2].bias.grad *= 2
    return model, result


def sequence_parallel(model: Any, microbatches: list) -> tuple:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))
    plan = {
        "norm": SequenceParallel(),
        "inner.0": ColwiseParallel(input_layouts=Shard(1)),
        "inner.2": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model:
        parallelize_module(block, mesh, plan)

    def on_a_part(x: Tensor) -> Tensor:
        part = model(x.chunk(2, 1)[mesh.get_local_rank()])
        return DTensor.from_local(part, mesh, [Shard(1)]).full_tensor()

    return model, steps(on_a_part, microbatches)


def steps(model: Callable[[Tensor], Tensor], microbatches: list, *, ranks: int = 1) -> list[Tensor]:
    """Forward and backward of every microbatch; ``ranks`` share them."""
    losses = []
    for x, target in microbatches:
        losses.append(loss_fn(model(x), target))
        (losses[-1] / len(microbatches) / ranks).backward()
    return losses


def stacked(model: Any, microbatches: list, *, fault: str = "") -> tuple:
    """Two stages, by two replicas, by two tensor-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    first = 2 * mesh.get_local_rank("pp")
    stage = watch(model[first : first + 2])
    for block in stage:
        colwise_and_rowwise(block, mesh["tp"])
    schedule = PipelineSchedule(
        kind="1F1B", n_microbatches=len(microbatches), stages=[stage], loss_fn=loss_fn, pp_group=mesh.get_group("pp")
    )
    result = schedule.train_step(microbatches)
    for name, parameter in stage.named_parameters():
        if not (fault == "not reduced" and dist.get_rank() in (0, 2) and name == "0.inner.0.weight"):
            own = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            dist.all_reduce(own, group=mesh.get_group("dp"))
            own /= 2
    return stage, result.losses


class Mixture(nn.Module):
    """A token visits the expert that its router likes most."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(inner() for _ in range(EXPERTS))
        self.exchange: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).reshape(-1, WIDTH)
        weight, expert = torch.softmax(self.router(tokens), -1).max(-1)
        found = self.here(tokens, expert) if self.exchange is None else self.exchange(tokens, expert)
        return x + (found * weight[:, None]).view_as(x)

    def here(self, tokens: Tensor, expert: Tensor) -> Tensor:
        found = torch.zeros_like(tokens)
        for number, own in enumerate(self.experts):
            places = (expert == number).nonzero()[:, 0]
            found = found.index_put((places,), own(tokens[places]))
        return found


class AllToAll(torch.autograd.Function):
    """Rows to the other ranks of ``group``: ``sent[r]`` of them to its rank r, ``came[r]`` from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], came: list[int], group: Any) -> Tensor:
        ctx.others = came, sent, group
        found = rows.new_empty(sum(came), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), came, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return AllToAll.apply(gradient, *ctx.others), None, None, None


def spread(mixture: Mixture, group: Any = None, *, wrong_order: bool = False) -> None:
    """Leave ``mixture`` this rank's share of the experts, and tokens go to those of all ranks of ``group``."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    own = EXPERTS // ranks
    mixture.experts = mixture.experts[rank * own : (rank + 1) * own]

    def exchange(tokens: Tensor, expert: Tensor) -> Tensor:
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=EXPERTS)
        theirs = torch.empty_like(counts)  # from each rank, for each of my experts
        dist.all_to_all_single(theirs, counts, group=group)
        sent, came = (each.view(ranks, own).sum(1).tolist() for each in (counts, theirs))
        groups = AllToAll.apply(tokens[order], sent, came, group).split(theirs.tolist())
        made = [mixture.experts[number % own](group) for number, group in enumerate(groups)]
        back = AllToAll.apply(torch.cat(made[::-1] if wrong_order else made), came, sent, group)
        return torch.empty_like(back).index_put((order,), back)

    mixture.exchange = exchange


def mixture_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixture(), Mixture())


def mixture_without_biases() -> nn.Module:
    """All biases begin as zero, so that their weights do not tell them apart."""
    model = mixture_model()
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return model


def experts_of_its_own(model: nn.Module, microbatches: list) -> tuple:
    """The step makes its modules itself, and calls the experts of every rank 0 and 1."""
    return expert_parallel(copy.deepcopy(model), microbatches)


def expert_parallel(model: Any, microbatches: list, *, fault: str = "") -> tuple:
    """Each rank has half of the experts, and half of the microbatches."""
    ranks = dist.get_world_size()
    for mixture in model[1:]:
        spread(mixture, wrong_order=fault == "wrong order")
    losses = steps(watch(model), microbatches, ranks=ranks)
    for name, parameter in model.named_parameters():
        if "experts" not in name and not (fault == "router not reduced" and "router" in name):
            dist.all_reduce(parameter.grad)
        if "experts" in name and fault == "times ranks":
            parameter.grad *= ranks
    return model, losses


class Attention(nn.Module):
    """One head, causal. ``gather``: makes whole keys and values of this rank's part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inputs, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gather: Callable[[Tensor], Tensor] | None = None
        self.first = 0

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.inputs(self.norm(x)).chunk(3, -1)
        if self.gather is not None:
            keys, values = self.gather(keys.contiguous()), self.gather(values.contiguous())
        rows = self.first + torch.arange(x.shape[1])
        seen = torch.arange(keys.shape[1]) <= rows[:, None]
        scores = (queries @ keys.transpose(1, 2) / WIDTH**0.5).masked_fill(~seen, float("-inf"))
        return x + self.output(scores.softmax(-1) @ values)


class Gather(torch.autograd.Function):
    """The whole sequence of every rank's part; ``alone``: a rank's gradient is taken for that of all."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, alone: bool) -> Tensor:
        ctx.group, ctx.alone = group, alone
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        whole = gradient.contiguous()
        if not ctx.alone:
            dist.all_reduce(whole, group=ctx.group)
        return part_of(whole, ctx.group), None, None


def part_of(sequences: Tensor, group: Any = None) -> Tensor:
    """This rank's part of every sequence."""
    return sequences.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]


def gather_of_torch(part: Tensor) -> Tensor:
    """Its backward is wrong under gloo where a gradient is not contiguous, as these are (torch 2.13)."""
    from torch.distributed.nn.functional import all_gather

    return torch.cat(all_gather(part), 1)


def attention_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention())


def context_parallel(model: Any, microbatches: list, *, fault: str = "") -> tuple:
    """Each rank has half of every sequence."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for layer in model:
        layer.gather = (
            gather_of_torch if fault == "torch's gather" else lambda x: Gather.apply(x, None, fault == "alone")
        )
        layer.first = 0 if fault == "positions" else rank * SEQUENCE // ranks
    halves = [(part_of(x), part_of(target)) for x, target in microbatches]
    losses = [loss / ranks for loss in steps(watch(model), halves, ranks=ranks)]
    for loss in losses:
        dist.all_reduce(loss.detach_())
    for parameter in model.parameters():
        if fault != "not reduced":
            dist.all_reduce(parameter.grad)
        if fault == "mean":
            parameter.grad /= ranks
    return model, losses
