"""Interleaved chunks: rank r holds stages r and P + r, and runs groups of P microbatches, all forwards first.

Each ``fault`` is at its place in the code; the empty name is the pipeline as it should be.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from truth_models import Pairs, Place, loss_fn, observed

Op = tuple[int, int]  # the number of a chunk, and a microbatch


class Chunks(Place):
    """One step of one rank; in a fault the rank ``where`` takes what came for one of its chunks for the other."""

    def __init__(self, chunks: list[nn.Module], microbatches: Pairs, fault: str, where: int) -> None:
        super().__init__(fault)
        self.chunks, self.microbatches, self.where = chunks, microbatches, where
        self.last = len(chunks) * self.ranks - 1
        self.given: dict[Op, Tensor] = {}
        self.made: dict[Op, Tensor] = {}
        self.early: dict[tuple[bool, Op], Tensor] = {}
        self.losses: list[Tensor] = []
        self.pending: list[Any] = []

    def order(self, *, back: bool) -> Iterator[Op]:
        count = len(self.microbatches)
        for first in range(0, count, self.ranks):
            for chunk in reversed(range(len(self.chunks))) if back else range(len(self.chunks)):
                yield from ((chunk, m) for m in range(first, min(first + self.ranks, count)))

    def run(self) -> list[Tensor]:
        for op in self.order(back=False):
            self.forward(op)
        for op in self.order(back=True):
            self.backward(op)
        for work, _ in self.pending:
            work.wait()
        for parameter in self.chunks[0].parameters():
            if self.at("first chunk halved", 2) and parameter.grad is not None:
                parameter.grad /= 2
        return self.losses

    def stage(self, op: Op) -> int:
        return op[0] * self.ranks + self.rank

    def send(self, tensor: Tensor, stage: int, m: int, *, back: bool) -> None:
        message = tensor.detach().clone()
        work = dist.isend(message, stage % self.ranks, tag=(2 * stage + back) * len(self.microbatches) + m)
        self.pending.append((work, message))

    def taken(self, op: Op, *, back: bool) -> Tensor:
        """What an operation takes: what came for it."""
        other = self.exchanged(op, back=back)
        for one in {op: None, other or op: None}:
            if (back, one) not in self.early:
                stage, buffer = self.stage(one), torch.empty_like(self.microbatches[0][0])
                tag = (2 * stage + back) * len(self.microbatches) + one[1]
                dist.recv(buffer, (stage + (1 if back else -1)) % self.ranks, tag=tag)
                self.early[back, one] = buffer
        return self.early[back, other or op]

    def exchanged(self, op: Op, *, back: bool) -> Op | None:
        """The operation of the rank's other chunk whose tensor is taken, in a fault."""
        chunk, m = op
        other = (1 - chunk, m + (self.ranks if chunk != back else -self.ranks))
        what = f"{'gradients' if back else 'inputs'} of chunks exchanged"
        if self.at(f"all {what}", self.where):
            return other if 0 <= other[1] < len(self.microbatches) else None
        if self.at(what, self.where):
            pair = ((0, 3), (1, 4)) if back else ((1, 3), (0, 4))
            return pair[1 - pair.index(op)] if op in pair else None
        return None

    def forward(self, op: Op) -> None:
        m = op[1]
        inputs, target = self.microbatches[m]
        if self.stage(op) > 0:
            inputs = self.taken(op, back=False).requires_grad_()
        made = self.chunks[op[0]](inputs)
        if self.stage(op) == self.last:
            loss = loss_fn(made, target)
            self.losses.append(loss.detach())
            made = loss / len(self.microbatches)
        else:
            self.send(made, self.stage(op) + 1, m, back=False)
        self.given[op], self.made[op] = inputs, made

    def backward(self, op: Op) -> None:
        chunk, m = op
        if self.at("chunk's newest first", 2) and chunk == 1:
            m = self.ranks * (2 * (m // self.ranks) + 1) - 1 - m
        made, inputs = self.made.pop((chunk, m)), self.given[chunk, m]
        made.backward(None if self.stage(op) == self.last else self.taken(op, back=True))
        if self.stage(op) > 0:
            assert inputs.grad is not None, "after its backward"
            self.send(inputs.grad, self.stage(op) - 1, op[1], back=True)


def step(model: nn.Sequential, microbatches: Pairs, *, fault: str = "", at: int = 1, watched: bool = True) -> Any:
    """One step on four ranks, two chunks of one layer each; hands back the chunks and the losses."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks: list[nn.Module] = [model[stage : stage + 1] for stage in (rank, ranks + rank)]
    return chunks, Chunks([observed(chunk, watched) for chunk in chunks], microbatches, fault, at).run() or None
