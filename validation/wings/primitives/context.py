"""Context parallelism by hand: each rank has a part of every sequence, and gathers keys and values of all.

torch's own ``context_parallel`` has no attention for CPUs (seen with torch 2.13).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeproof.wings.primitives.collectives import gathered, reduced
from pipeproof.wings.primitives.layers import Attention, Embedding, Microbatch, attended
from pipeproof.wings.primitives.part import RankPart
from pipeproof.wings.primitives.sizes import SEQUENCE


def places(mesh: DeviceMesh, *, zigzag: bool = False) -> Tensor:
    """The positions in a sequence of this rank's part.

    ``zigzag``: one piece of the beginning and one of the end, so that under a causal mask all ranks have as much to do.
    """
    own, positions = mesh.get_local_rank(), torch.arange(SEQUENCE)
    if not zigzag:
        return positions.chunk(mesh.size())[own]
    pieces = positions.chunk(2 * mesh.size())
    return torch.cat([pieces[own], pieces[-1 - own]])


def part_of(microbatch: Microbatch, mesh: DeviceMesh, *, zigzag: bool = False) -> Microbatch:
    """This rank's part of every sequence."""
    tokens, target = (one[:, places(mesh, zigzag=zigzag)] for one in microbatch)
    return tokens, target


AttendTo = Callable[..., Tensor]  # of a group, this rank's positions, its queries, keys and values


def split(stage: nn.Module, mesh: DeviceMesh, *, attend: AttendTo | None = None, zigzag: bool = False) -> nn.Module:
    """Let attention see all of every sequence, and positions be those of this rank's part. In place."""
    at = places(mesh, zigzag=zigzag)
    for module in stage.modules():
        if isinstance(module, Embedding):
            module.at = at
        if isinstance(module, Attention):
            module.attend = partial(attend or attended_to_all, mesh.get_group(), at)
    return stage


def attended_to_all(group: Any, at: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the queries at positions ``at`` to the keys of all ranks."""
    every = gathered(at[None], group, 1)[0]
    return attended(queries, gathered(keys, group, 2), gathered(values, group, 2), visible(at, every))


def visible(at: Tensor, every: Tensor) -> Tensor:
    """Which keys at positions ``every`` the queries at positions ``at`` may see."""
    return every <= at[:, None]


def summed(stage: nn.Module, mesh: DeviceMesh) -> None:
    """The gradients of all parameters: each rank has those of its part of the sequences."""
    for name, parameter in stage.named_parameters():
        reduced(name, parameter, mesh.get_group())


def of_sequences(attend: AttendTo | None = None, *, zigzag: bool = False) -> RankPart:
    """Context parallelism whose attention is ``attend``; None: the one that gathers."""
    cut, share = partial(split, attend=attend, zigzag=zigzag), partial(part_of, zigzag=zigzag)
    return RankPart(cut, share=share, finish=summed, summed=True, in_parts=True)


CONTEXT_PARALLEL = of_sequences()
ZIGZAG = of_sequences(zigzag=True)
