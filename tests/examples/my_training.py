from collections.abc import Iterator

import torch
import torch.distributed as dist
from my_pipeline import OneFOneB
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.whitebox import Operation


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@torch.no_grad()
def evaluate(pipeline: OneFOneB) -> list[Tensor]:
    for m in range(len(pipeline.microbatches)):
        pipeline.forward(m)
    for work, _ in pipeline.sent:
        work.wait()
    return pipeline.losses


def my_training(model: nn.Sequential, operations: Iterator[Operation], clear: bool = True) -> Iterator:
    stage = watch(model[2 * dist.get_rank() :][:2])  # the layers of this rank
    optimizer = sgd(stage)
    for operation, microbatches in operations:
        stage.train(operation != "eval")
        pipeline = OneFOneB(stage, microbatches)
        losses = evaluate(pipeline) if operation == "eval" else pipeline.step()
        if operation == "train":
            optimizer.step()
        yield stage, losses
        if operation == "train" and clear:
            optimizer.zero_grad()
