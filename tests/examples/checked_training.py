"""A training script with a pipeline of its own, one step of which is checked while it runs:

    torchrun --nproc-per-node 2 tests/examples/checked_training.py --check-at 2

The lines that concern pipeproof are marked. --fault plants a mistake, from step --fault-from on, to see what is said of
it; --write FILE makes the record of step 0 on one device, without ranks; --record FILE checks against that in place of
the model itself.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import Contract, SingleDevice, check_step, record_step, write_record  # pipeproof

M, WIDTH = 4, 16
Microbatch = tuple[Tensor, Tensor]
loss_fn = nn.functional.mse_loss


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(4)))


def microbatches_of(step: int) -> list[Microbatch]:
    draw = torch.Generator().manual_seed(step)
    return [(torch.randn(8, WIDTH, generator=draw), torch.randn(8, WIDTH, generator=draw)) for _ in range(M)]


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def forward_backward(stage: nn.Module, microbatches: list[Microbatch], fault: str) -> list[float]:
    """GPipe by hand, over two ranks: every forward, then every backward."""
    rank, kept, losses = dist.get_rank(), [], []
    for x, target in microbatches:
        if rank == 0:
            y = stage(x)
            dist.send(y.detach(), 1)
        else:
            dist.recv(x := torch.empty_like(x), 0)
            y = loss_fn(stage(x.requires_grad_()), target)
            losses.append(y.item())
        kept.append((x, y))
    for number, (x, y) in enumerate(kept):
        if rank == 1:
            (y if fault == "undivided" else y / M).backward()
            dist.send(x.grad, 0)
        else:
            dist.recv(gradient := torch.empty_like(y), 1)
            if fault != "dropped" or number != 2:
                y.backward(gradient)
    return losses


def clip(stage: nn.Module, max_norm: float) -> float:
    """Clip the gradients of both stages by the norm of them all."""
    square = torch.stack([p.grad.square().sum() for p in stage.parameters()]).sum()
    dist.all_reduce(square)
    norm = square.sqrt().item()
    for parameter in stage.parameters():
        parameter.grad.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


def train(stage: nn.Module, options: argparse.Namespace) -> int:
    optimizer, status = optimizer_of(stage), 0
    against = options.record or SingleDevice(build_model, loss_fn)  # pipeproof
    for step in range(options.steps):
        microbatches = microbatches_of(step)
        fault = options.fault if step >= options.fault_from else ""
        optimizer.zero_grad()
        if step not in options.check_at:
            forward_backward(stage, microbatches, fault)
            clip(stage, 1.0)
            optimizer.step()
            continue
        with check_step(stage, microbatches, against=against) as check:  # pipeproof
            losses = forward_backward(stage, microbatches, fault)
            check.gradients()  # pipeproof: complete, and not clipped yet
            norm = clip(stage, 1.0)
            optimizer.step()
            check.report(losses=losses or None, norm=norm)  # pipeproof
        if dist.get_rank() == 0:
            print(check.verdict.details)
        status = max(status, check.verdict.exit_status)
    return status


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--check-at", type=int, nargs="+", default=[2])
    parser.add_argument("--fault", choices=("", "undivided", "dropped"), default="")
    parser.add_argument("--fault-from", type=int, default=0)
    parser.add_argument("--record", metavar="FILE")
    parser.add_argument("--write", metavar="FILE")
    options = parser.parse_args()
    model = build_model()
    if options.write:
        record = record_step(
            model, microbatches_of(0), loss_fn=loss_fn, optimizer=optimizer_of(model), contract=Contract(max_norm=1.0)
        )
        write_record(record, options.write)
        return 0
    dist.init_process_group("gloo")
    first = 2 * dist.get_rank()
    status = train(model[first : first + 2], options)  # a slice keeps the whole model's names
    dist.barrier()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
