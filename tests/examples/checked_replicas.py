"""One checked step of a pipeline with replicas: torchrun --nproc-per-node 4 tests/examples/checked_replicas.py

Rank 2 * s + r holds stage s in replica r, and every replica runs microbatches of its own. ``--given all`` passes the
check those of all, ``--fault`` plants a mistake, and ``--model tied`` has one weight in both stages under one name.
"""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import Contract, SingleDevice, check_step, record_step, write_record

M, WIDTH = 4, 8
Microbatch = tuple[Tensor, Tensor]
loss_fn = nn.functional.mse_loss


class Tied(nn.Module):
    """Two layers, and the first one's weight once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.second(torch.tanh(self.first(x)))), self.first.weight)


class Last(nn.Module):
    """The second stage of that, with a copy of the weight."""

    def __init__(self, model: Tied) -> None:
        super().__init__()
        self.first, self.second = copy.deepcopy(model.first), model.second

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.second(x)), self.first.weight)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def build_tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def stage_of(model: nn.Module, stage: int) -> nn.Module:
    if isinstance(model, Tied):
        return Last(model) if stage else nn.ModuleDict({"first": model.first})
    return model[2 * stage : 2 * stage + 2]


def run(module: nn.Module, stage: int, own: list[Microbatch], peer: int, divisor: int) -> list[float]:
    """This rank's stage for each of its replica's microbatches in turn; the losses on the last stage."""
    losses = []
    for x, target in own:
        if stage == 0:
            y = torch.tanh(module["first"](x)) if isinstance(module, nn.ModuleDict) else module(x)
            dist.send(y.detach(), peer)
            dist.recv(gradient := torch.empty_like(y), peer)
            y.backward(gradient)
        else:
            dist.recv(x := torch.empty_like(x), peer)
            loss = loss_fn(module(x.requires_grad_()), target)
            losses.append(loss.item())
            (loss / divisor).backward()
            dist.send(x.grad, peer)
    return losses


def summed(module: nn.Module, options: argparse.Namespace, group: object) -> None:
    """Average over the replicas; then sum the weight that both stages have."""
    for name, parameter in module.named_parameters():
        if options.fault != "unreduced" and not (options.fault == "one" and name == "0.0.bias"):
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= 2
        if options.model == "tied" and name == "first.weight" and options.fault != "untied":
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2  # every stage's share is there once for each replica


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--given", choices=("own", "all"), default="own")
    parser.add_argument("--model", choices=("plain", "tied"), default="plain")
    parser.add_argument("--fault", choices=("", "unreduced", "one", "untied", "total"), default="")
    parser.add_argument("--write", metavar="FILE")
    parser.add_argument("--record", metavar="FILE")
    options = parser.parse_args()
    build = build_tied if options.model == "tied" else build_model
    draw = torch.Generator().manual_seed(0)
    every = [(torch.randn(8, WIDTH, generator=draw), torch.randn(8, WIDTH, generator=draw)) for _ in range(M)]
    if options.write:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        write_record(
            record_step(model, every, loss_fn=loss_fn, optimizer=optimizer, contract=Contract(max_norm=1e9)),
            options.write,
        )
        return 0
    dist.init_process_group("gloo")
    stage, replica = divmod(dist.get_rank(), 2)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own, module = every[replica::2], stage_of(build(), stage)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    against = options.record or SingleDevice(build, loss_fn)
    with check_step({stage: module}, own if options.given == "own" else every, against=against) as check:
        losses = run(module, stage, own, 2 * (1 - stage) + replica, len(own))
        summed(module, options, groups[stage])
        check.gradients()
        total = sum(losses) / len(losses) if losses and options.fault == "total" else None  # of its own: nobody says so
        check.report(losses=losses or None, loss=total)
        optimizer.step()
    if dist.get_rank() == 0:
        print(check.verdict.details)
    dist.barrier()
    dist.destroy_process_group()
    return check.verdict.exit_status


if __name__ == "__main__":
    raise SystemExit(main())
