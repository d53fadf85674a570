"""Expert parallelism by hand: each rank has some of the experts, and tokens go to those of all ranks and back.

Dispatch and combine are all-to-alls, as in GShard (Lepikhin and others, 2020) and Megatron-LM.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeproof.wings.primitives.collectives import reduced
from pipeproof.wings.primitives.layers import Mixture
from pipeproof.wings.primitives.part import RankPart
from pipeproof.wings.primitives.sizes import EXPERTS


class AllToAll(torch.autograd.Function):
    """Rows to the other ranks of ``group``: ``sent[r]`` of them to its rank r, ``came[r]`` from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], came: list[int], group: Any) -> Tensor:
        """The rows that came, (their number, width)."""
        ctx.others = came, sent, group
        found = rows.new_empty(sum(came), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), came, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients go back the way that rows came."""
        return AllToAll.apply(gradients[0], *ctx.others), None, None, None  # type: ignore[no-untyped-call]  # in torch


def spread(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Leave every mixture of ``stage`` this rank's share of the experts. In place."""
    group, rank, own = mesh.get_group(), mesh.get_local_rank(), EXPERTS // mesh.size()
    for mixture in mixtures(stage):
        mixture.experts = mixture.experts[rank * own : (rank + 1) * own]
        mixture.visit = partial(visited, mixture.experts, group)
    return stage


def mixtures(stage: nn.Module) -> list[Mixture]:
    """Those in ``stage``."""
    return [module for module in stage.modules() if isinstance(module, Mixture)]


def visited(experts: nn.ModuleList, group: Any, tokens: Tensor, expert: Tensor) -> Tensor:
    """What the chosen experts, of whatever rank of ``group``, make of the tokens; in the order of the tokens."""
    order = expert.argsort(stable=True)
    counts = torch.bincount(expert, minlength=EXPERTS)
    theirs = torch.empty_like(counts)  # from each rank, for each of my experts
    dist.all_to_all_single(theirs, counts, group=group)
    sent, came = (each.view(-1, len(experts)).sum(1).tolist() for each in (counts, theirs))
    arrived = exchanged(tokens[order], sent, came, group)
    back = exchanged(computed(experts, arrived, theirs.tolist()), came, sent, group)
    return in_order(back, order)


def exchanged(rows: Tensor, sent: list[int], came: list[int], group: Any) -> Tensor:
    """The rows that came for those that were sent."""
    return AllToAll.apply(rows, sent, came, group)  # type: ignore[no-untyped-call,no-any-return]  # in torch


def computed(experts: nn.ModuleList, arrived: Tensor, counts: list[int]) -> Tensor:
    """What the experts here make of tokens that came in ``counts``, by rank and then by expert; in that order."""
    groups = arrived.split(counts)  # type: ignore[no-untyped-call]  # in torch
    return torch.cat([experts[number % len(experts)](group) for number, group in enumerate(groups)])


def in_order(rows: Tensor, order: Tensor) -> Tensor:
    """Row k where ``order[k]`` says."""
    return torch.empty_like(rows).index_put((order,), rows)


def summed(stage: nn.Module, mesh: DeviceMesh) -> None:
    """The gradients of what all ranks have: the router's, too, but not the experts'."""
    for name, parameter in stage.named_parameters():
        if not is_expert(name):
            reduced(name, parameter, mesh.get_group())


def is_expert(name: str) -> bool:
    """Whether the parameter ``name`` is one rank's own."""
    return "experts" in name.split(".")


EXPERT_PARALLEL = RankPart(spread, finish=summed, summed=True)
