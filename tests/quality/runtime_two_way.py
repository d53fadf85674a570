"""A pipeline that runs both ways: rank r holds stage r of one direction and stage P-1-r of the other.

Half of the microbatches enter at either end; in the end the two copies of a stage add their gradients. Each ``fault``
is at its place in the code; the empty name is the pipeline as it should be.
"""

from typing import Any

import torch
import torch.distributed as dist
from runtime_plain import exchange, one_f_one_b
from torch import Tensor, nn
from truth_models import Pairs, Place, loss_fn, observed, squares, through

Op = tuple[int, str, int]  # direction, F or B, and the number within the direction


def orders(ranks: int, count: int) -> list[list[Op]]:
    """Both directions merged for every rank: whatever is ready, the directions taking turns."""
    left = [[[*one_f_one_b(r if d else ranks - 1 - r, count)] for d in (0, 1)] for r in range(ranks)]
    made: list[list[Op]] = [[] for _ in range(ranks)]
    done: set[tuple[int, str, int, int]] = set()  # direction, F or B, number, place

    def ready(rank: int, d: int) -> bool:
        if not left[rank][d]:
            return False
        (kind, m), place = left[rank][d][0], rank if d == 0 else ranks - 1 - rank
        if kind == "F":
            return place == 0 or (d, "F", m, place - 1) in done
        return place == ranks - 1 or (d, "B", m, place + 1) in done

    for turn in range(8 * ranks * count):
        now = []
        for rank in range(ranks):
            for d in ((turn + rank) % 2, (turn + rank + 1) % 2):
                if ready(rank, d):
                    now.append((rank, d))
                    break
        for rank, d in now:
            kind, m = left[rank][d].pop(0)
            made[rank].append((d, kind, m))
            done.add((d, kind, m, rank if d == 0 else ranks - 1 - rank))
    assert not any(any(rows) for rows in left), "every operation is in an order"
    return made


class TwoWay(Place):
    """One step of one rank."""

    def __init__(self, modules: list[nn.Module], microbatches: Pairs, fault: str) -> None:
        super().__init__(fault)
        self.modules, self.microbatches = modules, microbatches
        self.half = len(microbatches) // 2
        self.live: list[list[tuple[Tensor, Tensor]]] = [[], []]
        self.losses = torch.zeros(len(microbatches))
        self.pending: list[Any] = []
        self.buffer = torch.empty_like(microbatches[0][0])

    def here(self, fault: str, rank: int, direction: int) -> bool:
        return self.at(fault, rank) and self.now == direction

    def place(self, direction: int) -> int:
        return self.rank if direction == 0 else self.ranks - 1 - self.rank

    def neighbour(self, direction: int, ahead: bool) -> int:
        return self.rank + (1 if (direction == 0) == ahead else -1)

    def run(self) -> None:
        for direction, kind, m in orders(self.ranks, self.half)[self.rank]:
            self.now = direction
            (self.forward if kind == "F" else self.backward)(direction, m)
        for work, _ in self.pending:
            work.wait()
        self.reduce()
        if self.fault != "losses of one direction":
            dist.all_reduce(self.losses)

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        self.pending.append((dist.isend(tensor, peer, tag=tag), tensor))

    def receive(self, peer: int, tag: int, *, reused: bool = False) -> Tensor:
        buffer = self.buffer.detach() if reused else torch.empty_like(self.buffer)
        dist.recv(buffer, peer, tag=tag)
        self.last_received = buffer
        return buffer

    def forward(self, d: int, m: int) -> None:
        number = d * self.half + m
        inputs, target = self.microbatches[number]
        if self.fault == "targets of the other direction" and d == 1:
            target = self.microbatches[m][1]
        if self.place(d) > 0:
            reused = self.here("one buffer for a direction", 1, 1)
            inputs = self.receive(self.neighbour(d, False), 4 * m + d, reused=reused).requires_grad_()
            if self.here("other chunk's input", 2, 0) and m == 1:
                inputs = self.live[1][-1][0].detach().clone().requires_grad_()
        made = self.modules[d](inputs)
        if self.place(d) == self.ranks - 1:
            loss = loss_fn(made, target)
            self.losses[number] = loss.detach()
            made = loss / (self.half if self.here("divided by its own half", 0, 1) else len(self.microbatches))
        else:
            message = made.detach()
            if self.here("activations rounded one way", 2, 1):
                message = through(torch.bfloat16)(message)
            self.send(message, self.neighbour(d, True), 4 * m + d)
        self.live[d].append((inputs, made))

    def backward(self, d: int, m: int) -> None:
        newest = self.here("newest graph first", 1, 0) or self.here("newest graph first there", 2, 1)
        inputs, made = self.live[d].pop(-1 if newest else 0)
        skipped = self.here("second half not added", 1, 1)
        before = [p.grad for p in self.modules[d].parameters()] if skipped else []
        if skipped:
            self.modules[d].zero_grad(set_to_none=True)
        last = self.place(d) == self.ranks - 1
        made.backward(None if last else self.receive(self.neighbour(d, True), 4 * m + d + 2), retain_graph=m == 0)
        if self.here("first one run twice", 0, 0) and m == 0:
            made.backward(self.last_received, inputs=list(self.modules[d].parameters()))
        if skipped:
            for parameter, old in zip(self.modules[d].parameters(), before, strict=True):
                parameter.grad = old
        if self.place(d) > 0:
            gradient = inputs.grad
            assert gradient is not None, "after its backward"
            if self.here("gradient halved one way", 1, 1):
                gradient = gradient * 0.5
            self.send(gradient, self.neighbour(d, False), 4 * m + d + 2)

    def reduce(self) -> None:
        """The two copies of a stage add their gradients."""
        peer = self.ranks - 1 - self.rank
        if self.at("one copy negated", 3):
            for parameter in self.modules[1].parameters():
                assert parameter.grad is not None, "after the last backward"
                parameter.grad.neg_()
        for stage, module in sorted((self.place(d), module) for d, module in enumerate(self.modules)):
            if self.fault == "a pair that does not meet" and stage == 1:
                continue
            for number, parameter in enumerate(module.parameters()):
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                if self.fault == "bias that does not meet" and stage == 2 and number == 3:
                    continue
                total = exchange(own, peer)
                parameter.grad = total / 2 if self.fault == "mean of the pair" else total
                if self.at("one copy halved after they met", 3) and stage == 0:
                    parameter.grad /= 2
                if self.at("one copy cleared after they met", 1) and stage == 1:
                    parameter.grad.zero_()


def step(model: nn.Sequential, microbatches: Pairs, *, fault: str = "", watched: bool = True) -> Any:
    """One step on four ranks, four stages of two layers each, both ways; hands back modules, losses and the norm."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    per = len(model) // ranks
    modules: list[nn.Module] = [model[per * place : per * (place + 1)] for place in (rank, ranks - 1 - rank)]
    if fault == "copies that drifted apart" and rank == 2:
        for parameter in modules[1].parameters():
            parameter.data = parameter.data * 1.01
    pipeline = TwoWay([observed(module, watched) for module in modules], microbatches, fault)
    pipeline.run()
    total = squares(nn.ModuleList(modules))
    dist.all_reduce(total)
    norm = (total if fault == "both copies in the norm" else total / 2).sqrt()
    return modules, list(pipeline.losses) if rank in (0, ranks - 1) else None, norm
