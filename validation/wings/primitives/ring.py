"""Ring attention by hand (Liu and others, 2023): keys and values of each rank go round, a block at a time.

Blocks are merged by the logarithms of their sums of exponentials, like in FlashAttention (Dao and others, 2022). In the
backward, blocks go round again, with their gradients from all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.wings.primitives.context import of_sequences, visible

NEVER = float("-inf")


class Ring(torch.autograd.Function):
    """Causal attention from queries at positions ``at`` to all ranks' keys: (batch, heads, part, width)."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, at: Tensor, group: Any) -> Tensor:
        """Return attention over all ranks' values."""
        ctx.group = group
        found, total = torch.zeros_like(queries), queries.new_full((*queries.shape[:-1], 1), NEVER)
        block: Sequence[Tensor] = (keys, values, at)
        for _ in range(dist.get_world_size(group)):
            every = scores(queries, at, block[0], block[2])
            sums = every.logsumexp(3, keepdim=True)
            found, total = merge((found, total), (share(every, sums) @ block[1], sums))
            block = pass_on(block, group)
        ctx.save_for_backward(queries, keys, values, at, found, total)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return gradients for queries, keys and values: after a round, each block's are back at its rank."""
        queries, keys, values, at, found, total = ctx.saved_tensors
        gradient, of_queries = gradients[0], torch.zeros_like(queries)
        of_found = (gradient * found).sum(3, keepdim=True)
        block: Sequence[Tensor] = (keys, values, at, torch.zeros_like(keys), torch.zeros_like(values))
        for _ in range(dist.get_world_size(ctx.group)):
            keys, values, places, *sums = block
            weights = share(scores(queries, at, keys, places), total)
            of_scores = weights * (gradient @ values.transpose(2, 3) - of_found) / queries.shape[3] ** 0.5
            of_queries = of_queries + of_scores @ keys
            theirs = of_scores.transpose(2, 3) @ queries, weights.transpose(2, 3) @ gradient
            block = pass_on((keys, values, places, *add(sums, theirs)), ctx.group)
        return of_queries, *block[3:], None, None


def scores(queries: Tensor, at: Tensor, keys: Tensor, places: Tensor) -> Tensor:
    """Of queries at ``at`` and keys at ``places``, (batch, heads, queries, keys)."""
    observed = visible(at, places)
    products = queries @ keys.transpose(2, 3) / queries.shape[3] ** 0.5
    return products.masked_fill(~observed, NEVER)  # type: ignore[no-any-return]  # in torch


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over two blocks, each with the logarithm of its sum of exponentials; masked ones have zeros."""
    total = torch.logaddexp(one[1], other[1])
    return one[0] * share(one[1], total) + other[0] * share(other[1], total), total


def share(part: Tensor, total: Tensor) -> Tensor:
    """Return the ratio of ``part`` to ``total``, both logarithms; 0 for an empty total."""
    return torch.exp(part - total.masked_fill(total == NEVER, 0))


def add(gradients: Sequence[Tensor], more: Sequence[Tensor]) -> list[Tensor]:
    """Add this rank's gradients to the sum."""
    return [one + other for one, other in zip(gradients, more, strict=True)]


def pass_on(block: Sequence[Tensor], group: Any) -> list[Tensor]:
    """Send the block to the next rank, and receive the previous rank's."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    before, after = (dist.get_global_rank(group, (rank + step) % size) for step in (-1, 1))
    came = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in block]
    sends = [dist.P2POp(dist.isend, one.contiguous(), after, group) for one in block]
    receives = [dist.P2POp(dist.irecv, one, before, group) for one in came]
    for work in dist.batch_isend_irecv([*sends, *receives]):
        work.wait()
    return came


def attend_round(group: Any, at: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Apply causal attention of queries at positions ``at`` to all ranks' keys."""
    return Ring.apply(queries, keys, values, at, group)  # type: ignore[no-untyped-call,no-any-return]  # in torch


PARTS = {"ring": of_sequences(attend_round), "ring-zigzag": of_sequences(attend_round, zigzag=True)}
