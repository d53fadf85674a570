"""Context parallelism by hand: each rank has a part of every sequence, and gathers keys and values of all.

torch's own ``context_parallel`` has no attention for CPUs (observed with torch 2.13).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeproof.wings.primitives.collectives import gather, sum_gradients
from pipeproof.wings.primitives.layers import Attention, Embedding, Microbatch, attend
from pipeproof.wings.primitives.part import RankPart
from pipeproof.wings.primitives.stacks import SEQUENCE


def places(mesh: DeviceMesh, *, zigzag: bool = False) -> Tensor:
    """Return the positions of this rank's part in a sequence.

    ``zigzag``: a piece from the beginning and a piece from the end, to balance work under a causal mask.
    """
    own, positions = mesh.get_local_rank(), torch.arange(SEQUENCE)
    if not zigzag:
        return positions.chunk(mesh.size())[own]
    pieces = positions.chunk(2 * mesh.size())
    return torch.cat([pieces[own], pieces[-1 - own]])


def part_of(microbatch: Microbatch, mesh: DeviceMesh, *, zigzag: bool = False) -> Microbatch:
    """Return this rank's part of every sequence."""
    tokens, target = (one[:, places(mesh, zigzag=zigzag)] for one in microbatch)
    return tokens, target


AttendTo = Callable[..., Tensor]  # of a group, this rank's positions, its queries, keys and values


def split(stage: nn.Module, mesh: DeviceMesh, *, attend: AttendTo | None = None, zigzag: bool = False) -> nn.Module:
    """Let attention see whole sequences, with positions of this rank's part. In place."""
    at = places(mesh, zigzag=zigzag)
    for module in stage.modules():
        if isinstance(module, Embedding):
            module.at = at
        if isinstance(module, Attention):
            module.attend = partial(attend or attend_to_all, mesh.get_group(), at)
    return stage


def attend_to_all(group: Any, at: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Apply causal attention of queries at positions ``at`` to all ranks' keys."""
    every = gather(at[None], group, 1)[0]
    return attend(queries, gather(keys, group, 2), gather(values, group, 2), visible(at, every))


def visible(at: Tensor, every: Tensor) -> Tensor:
    """Which keys at positions ``every`` the queries at positions ``at`` may see."""
    return every <= at[:, None]


def of_sequences(attend: AttendTo | None = None, *, zigzag: bool = False) -> RankPart:
    """Return context parallelism with attention ``attend``; None: the gathering kind."""
    cut, share = partial(split, attend=attend, zigzag=zigzag), partial(part_of, zigzag=zigzag)
    return RankPart(cut, share=share, finish=sum_gradients, summed=True, in_parts=True)


PARTS = {"cp": of_sequences(), "cp-zigzag": of_sequences(zigzag=True)}
