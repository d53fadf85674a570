"""The loop of ``long_runs`` on two ranks that have parts of its parameters."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipeproof import record_run
from tests.support.long_runs import RATE, M, loss_fn, microbatches_of, model_of


def in_shards(
    to: Path,
    numbers: Sequence[int],
    *,
    cut: bool,
    fault: Callable[[nn.Module], None] | None = None,
    evaluated: bool = False,
) -> None:
    """The same steps on two ranks that have parts of parameters; ``cut``: by tensor parallelism, else ``fully_shard``.

    ``fault``: what rank 1 does to its model before the first step. ``evaluated``: it is evaluated before, so that
    ``fully_shard`` has whole weights when recording begins.
    """
    model, rank = model_of(), dist.get_rank()
    if cut:
        plan = {"0.0": ColwiseParallel(output_layouts=Replicate()), "2": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    else:
        fully_shard(model)
    if fault is not None and rank:
        fault(model)
    optimizer, share = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9), 1 if cut else 2
    if evaluated:
        with torch.no_grad():
            model(microbatches_of(0)[0][0])
    with record_run(model, to, optimizer=optimizer) as run:
        for number in numbers:
            own = microbatches_of(number) if cut else microbatches_of(number)[2 * rank : 2 * rank + 2]
            with run.step(own, number=number) as step:
                optimizer.zero_grad()
                losses = [loss_fn(model(inputs), target) for inputs, target in own]
                (share * sum(losses) / M).backward()
                step.gradients()
                norm = torch.stack([_whole(one.grad).norm() for one in model.parameters()]).norm()
                for one in model.parameters():
                    one.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0).item())
                optimizer.step()
                step.report(losses=[one.item() for one in losses], norm=norm.item())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
