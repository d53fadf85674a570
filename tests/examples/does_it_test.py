"""Does a usual test of a pipeline test anything? python tests/examples/does_it_test.py"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import whitebox
from pipeproof.worlds.worker import RankContext


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def losses_of(stage: nn.Module, microbatches: list[tuple[Tensor, Tensor]], rank: int) -> list[float]:
    found = []
    for x, target in microbatches:
        if rank == 0:
            out = stage(x)
            dist.send(out.detach(), 1)
            flow = torch.empty(4, 8)
            dist.recv(flow, 1)
            out.backward(flow)
        else:
            x = torch.empty(4, 8)
            dist.recv(x, 0)
            loss = nn.functional.mse_loss(stage(x.requires_grad_()), target)
            loss.backward()
            assert x.grad is not None
            dist.send(x.grad, 0)
            found.append(loss.item())
    return found


def my_test(context: RankContext) -> None:
    draw = torch.Generator().manual_seed(0)
    microbatches = [(torch.randn(4, 8, generator=draw), torch.zeros(4, 8)) for _ in range(3)]
    model = build()
    stage = model[:2] if context.rank == 0 else model[2:]
    with whitebox.under_test():
        losses = losses_of(stage, microbatches, context.rank)
    if context.rank == 1:
        expected = [nn.functional.mse_loss(build()(x), target).item() for x, target in microbatches]
        torch.testing.assert_close(losses, expected)


if __name__ == "__main__":
    print(whitebox.mutate(my_test, ranks=2))
