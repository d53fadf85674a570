"""An engine that executes instructions over a ring of buffers: load, forward, backward, send, receive, then reduce.

Each ``fault`` is at its place in the code; the empty name is the engine as it should be.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from runtime_plain import exchange, one_f_one_b
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from truth_models import Pairs, Place, loss_fn, observed, squares, through

Instruction = tuple[str, int]  # its name and the microbatch


def instructions(rank: int, ranks: int, count: int) -> Iterator[Instruction]:
    """1F1B as instructions."""
    for kind, m in one_f_one_b(ranks - 1 - rank, count):
        names = ("load_microbatch", "recv_activation", "forward_pass", "send_activation")
        for name in names if kind == "F" else ("recv_grad", "backward_pass", "send_grad"):
            yield name, m
    yield "reduce_grads", 0


@dataclass
class Slot:
    """One pipe buffer."""

    inputs: Any = None
    labels: Any = None
    outputs: Any = None
    gradient: Any = None


class Engine(Place):
    """Runs the instructions of one rank."""

    def __init__(self, module: nn.Module, microbatches: Pairs, fault: str, *, recompute: bool) -> None:
        super().__init__(fault)
        self.module, self.microbatches, self.recompute = module, microbatches, recompute
        self.first, self.final = self.rank == 0, self.rank == self.last
        self.slots = [Slot() for _ in range(min(self.ranks - self.rank + 1, len(microbatches)))]
        self.received = torch.empty_like(microbatches[0][0])
        self.grad_received = torch.zeros_like(self.received)
        self.losses, self.pending = list[Tensor](), list[Any]()

    def slot(self, m: int) -> Slot:
        return self.slots[m % len(self.slots)]

    def run(self) -> list[Tensor]:
        for name, m in instructions(self.rank, self.ranks, len(self.microbatches)):
            getattr(self, name)(m)
        for work, _ in self.pending:
            work.wait()
        return self.losses

    def load_microbatch(self, m: int) -> None:
        if self.first:
            other = {0: 1, 1: 0}.get(m, m) if self.at("inputs exchanged", 0) else m
            self.slot(m).inputs = self.microbatches[other][0]
        if self.final:
            other = {4: 5, 5: 4}.get(m, m) if self.at("labels exchanged", 3) else m
            self.slot(m).labels = self.microbatches[other][1]

    def recv_activation(self, m: int) -> None:
        if self.first:
            return
        dist.recv(self.received, self.rank - 1)
        kept = self.received if self.at("receive buffer not cloned", 2) else self.received.clone()
        if self.at("partition not gathered", 2) and m == 1:
            kept.view(-1)[kept.numel() // 2 :] = 0
        if self.at("older activation", 1) and m == 5:
            kept = self.slot(4).inputs.detach().clone()
        self.slot(m).inputs = kept.detach().requires_grad_()

    def forward_pass(self, m: int) -> None:
        slot = self.slot(m)
        whole = not self.at("second layer not called", 2)
        module = self.module if whole else self.module[0]  # type: ignore[index]
        made = checkpoint(module, slot.inputs, use_reentrant=False) if self.recompute else module(slot.inputs)
        if self.at("layer called twice", 1):
            made = self.module[1](made)  # type: ignore[index]
        if self.final:
            loss = loss_fn(made, slot.labels)
            self.losses.append(loss.detach())
            made = loss if self.fault == "accumulation steps forgotten" else loss / len(self.microbatches)
        slot.outputs = made

    def send_activation(self, m: int) -> None:
        if not self.final:
            message = self.slot(m).outputs.detach()
            self.pending.append((dist.isend(message, self.rank + 1), message))

    def recv_grad(self, m: int) -> None:
        if self.final:
            return
        arrived = torch.empty_like(self.grad_received)
        dist.recv(arrived, self.rank + 1)
        if self.at("gradient read before it came", 1) and m == 2:
            arrived = torch.zeros_like(arrived)
        self.slot(m).gradient = arrived

    def backward_pass(self, m: int) -> None:
        graph = {2: 3, 3: 2}.get(m, m) if self.at("buffer ids exchanged", 1) else m
        slot = self.slot(graph)
        if self.at("last one without weights", 0) and m == len(self.microbatches) - 1:
            return
        before = [None if p.grad is None else p.grad.clone() for p in self.module.parameters()]
        slot.outputs.backward(None if self.final else self.slot(m).gradient)
        if self.at("sum started anew", 1) and m == 3:
            for parameter, old in zip(self.module.parameters(), before, strict=True):
                parameter.grad = parameter.grad if parameter.grad is None or old is None else parameter.grad - old

    def send_grad(self, m: int) -> None:
        if self.first:
            return
        graph = {2: 3, 3: 2}.get(m, m) if self.at("buffer ids exchanged", 1) else m
        message = self.slot(graph).inputs.grad
        if self.at("gradients in fp16", 2):
            message = through(torch.float16)(message)
        self.pending.append((dist.isend(message, self.rank - 1), message))

    def reduce_grads(self, _: int) -> None:
        for number, parameter in enumerate(self.module.parameters()):
            if parameter.grad is None:
                continue
            if self.at("mean over one replica too many", 2):
                parameter.grad.div_(2)
            if self.at("norm cleared", 2) and number == 0:
                parameter.grad.zero_()
            if self.at("sums in bf16", 1):
                parameter.grad.copy_(through(torch.bfloat16)(parameter.grad))
        if self.at("averaged with the neighbour", 0, 1):
            own = next(self.module.parameters()).grad
            assert own is not None, "after the last backward"
            own.copy_(exchange(own, 1 - self.rank).div_(2))


def step(
    model: nn.Sequential, microbatches: Pairs, *, fault: str = "", watched: bool = True, recompute: bool = False
) -> Any:
    """One step on four ranks, two layers each; hands back the stage, the losses and the norm."""
    rank = dist.get_rank()
    module = model[2 * rank : 2 * rank + 2]
    if fault == "weights drawn again" and rank == 2:
        torch.manual_seed(77)
        for layer in module:
            torch.nn.init.normal_(layer.linear.weight, std=0.3)
    losses = Engine(observed(module, watched), microbatches, fault, recompute=recompute).run()
    if fault == "loss reported divided":
        losses = [loss / len(microbatches) for loss in losses]
    norm = squares(module)
    if fault == "norm without the last rank" and rank == dist.get_world_size() - 1:
        norm.zero_()
    dist.all_reduce(norm)
    return module, losses or None, norm.sqrt()
