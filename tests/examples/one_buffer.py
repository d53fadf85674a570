"""A planted bug, outside pytest: what 1F1B by hand says when it receives all activations into one buffer."""

import sys
from functools import partial

import torch
import torch.distributed as dist
from hand_written_1f1b import OneFOneB
from test_my_pipeline import build_model, loss_fn
from torch import nn

from pipeproof.foreign import validate, watch


def my_step(model: nn.Sequential, microbatches: list, fault: str) -> tuple:
    stage = watch(model[2 * dist.get_rank() : 2 * dist.get_rank() + 2])
    return stage, OneFOneB(stage, microbatches, loss_fn, fault=fault).step()


if __name__ == "__main__":
    torch.manual_seed(1)
    data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(6)]
    step = partial(my_step, fault="one-buffer")
    verdict = validate(step, reference=build_model, microbatches=data, ranks=4, loss_fn=loss_fn)
    print(verdict)
    sys.exit(verdict.exit_status)
