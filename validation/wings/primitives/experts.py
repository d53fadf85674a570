"""Expert parallelism by hand: each rank has some of the experts, and tokens go to those of all ranks and back.

Dispatch and combine are all-to-alls, as in GShard (Lepikhin and others, 2020) and Megatron-LM.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeproof.wings.primitives.collectives import sum_gradients
from pipeproof.wings.primitives.layers import Mixture
from pipeproof.wings.primitives.part import RankPart
from pipeproof.wings.primitives.stacks import EXPERTS


class AllToAll(torch.autograd.Function):
    """Exchange rows in ``group``: ``sent[r]`` to rank r, ``came[r]`` from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], came: list[int], group: Any) -> Tensor:
        """Return the received rows, (count, width)."""
        ctx.others = came, sent, group
        found = rows.new_empty(sum(came), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), came, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return gradients the way rows came."""
        return AllToAll.apply(gradients[0], *ctx.others), None, None, None  # type: ignore[no-untyped-call]  # in torch


def spread(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Keep this rank's share of experts in each mixture of ``stage``. In place."""
    group, rank, own = mesh.get_group(), mesh.get_local_rank(), EXPERTS // mesh.size()
    for mixture in (module for module in stage.modules() if isinstance(module, Mixture)):
        mixture.experts = mixture.experts[rank * own : (rank + 1) * own]
        mixture.visit = partial(visit_experts, mixture.experts, group)
    return stage


def visit_experts(experts: nn.ModuleList, group: Any, tokens: Tensor, expert: Tensor) -> Tensor:
    """Apply the chosen experts, on all ranks of ``group``, to tokens, keeping their order."""
    order = expert.argsort(stable=True)
    counts = torch.bincount(expert, minlength=EXPERTS)
    theirs = torch.empty_like(counts)  # from each rank, for each of my experts
    dist.all_to_all_single(theirs, counts, group=group)
    sent, came = (each.view(-1, len(experts)).sum(1).tolist() for each in (counts, theirs))
    arrived = exchange(tokens[order], sent, came, group)
    back = exchange(compute(experts, arrived, theirs.tolist()), came, sent, group)
    return in_order(back, order)


def exchange(rows: Tensor, sent: list[int], came: list[int], group: Any) -> Tensor:
    """Exchange rows."""
    return AllToAll.apply(rows, sent, came, group)  # type: ignore[no-untyped-call,no-any-return]  # in torch


def compute(experts: nn.ModuleList, arrived: Tensor, counts: list[int]) -> Tensor:
    """Apply local experts to tokens in ``counts``, ordered by rank, then by expert; keep this order."""
    groups = arrived.split(counts)  # type: ignore[no-untyped-call]  # in torch
    return torch.cat([experts[number % len(experts)](group) for number, group in enumerate(groups)])


def in_order(rows: Tensor, order: Tensor) -> Tensor:
    """Put row k at ``order[k]``."""
    return torch.empty_like(rows).index_put((order,), rows)


def is_expert(name: str) -> bool:
    """True if the parameter ``name`` belongs to one rank."""
    return "experts" in name.split(".")


FINISH = partial(sum_gradients, unless=lambda name, parameter: is_expert(name))
PARTS = {"ep": RankPart(spread, finish=FINISH, summed=True)}
