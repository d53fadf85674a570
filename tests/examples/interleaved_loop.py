"""An interleaved 1F1B loop that takes a forward_step_func, data iterators and model chunks. ``fault`` plants a bug.

Messages are told apart by tags and cross: on NCCL, which has no tags, it may hang.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ForwardStep = Callable[[Iterator[Any], nn.Module, Tensor | None], tuple[Tensor, Callable[[Tensor], Tensor]]]


class Links:
    """Messages between stages, told apart by tags: stage s is on rank s modulo P."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape, self.ranks, self.pending = shape, dist.get_world_size(), list[Any]()

    def send(self, tensor: Tensor, stage: int, tag: int) -> None:
        self.pending.append((dist.isend(tensor, stage % self.ranks, tag=tag), tensor))

    def receive(self, stage: int, tag: int) -> Tensor:
        tensor = torch.empty(self.shape)
        dist.recv(tensor, stage % self.ranks, tag=tag)
        return tensor

    def finish(self) -> None:
        for work, _ in self.pending:
            work.wait()


def forward_backward(
    forward_step_func: ForwardStep,
    data_iterators: Sequence[Iterator[Any]],
    model_chunks: Sequence[nn.Module],
    *,
    num_microbatches: int,
    shape: Sequence[int],
    fault: str = "",
) -> list[Tensor]:
    """One step: chunk v of rank r is stage v P + r; returns the losses, on the rank of the last stage."""
    rank, ranks, chunks = dist.get_rank(), dist.get_world_size(), len(model_chunks)
    links, last, total = Links(shape), ranks * chunks - 1, num_microbatches * chunks
    live: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
    losses: list[Tensor] = []

    def place(k: int, forward: bool) -> tuple[int, int]:
        """The chunk and microbatch of the k-th forward or backward: groups of P microbatches, chunk by chunk."""
        group, inside = divmod(k, ranks * chunks)
        chunk, m = divmod(inside, ranks)
        return chunk if forward else chunks - 1 - chunk, group * ranks + m

    def forward(k: int) -> None:
        chunk, m = place(k, True)
        stage = chunk * ranks + rank
        x = None if stage == 0 else links.receive(stage - 1, 2 * m).requires_grad_()
        output, loss_func = forward_step_func(data_iterators[chunk], model_chunks[chunk], x)
        if stage == last:
            loss = loss_func(output)
            losses.append(loss.detach())
            output = loss if fault == "undivided" else loss / num_microbatches
        else:
            links.send(output.detach(), stage + 1, 2 * m)
        live[chunk, m] = x, output

    def backward(k: int) -> None:
        chunk, m = place(k, False)
        stage = chunk * ranks + rank
        other = fault == "other-chunk" and (rank, m) == (1, 2)  # of what one rank keeps for two stages
        x, output = live.pop((1 - chunk if other else chunk, m))
        output.backward(None if stage == last else links.receive(stage + 1, 2 * m + 1))
        if x is not None and x.grad is not None:
            links.send(x.grad, stage - 1, 2 * m + 1)

    warm_up = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
    for k in range(warm_up):
        forward(k)
    for k in range(total):
        if warm_up + k < total:
            forward(warm_up + k)
        backward(k)
    links.finish()
    return losses
