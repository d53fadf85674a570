"""A planted bug, outside pytest: what is said of a stage that somebody forgot to put into DDP."""

import sys
from functools import partial

import torch
from around_the_pipeline import REPLICAS, WIDTH, build_model, replicated
from torch import nn

from pipeproof.foreign import validate

if __name__ == "__main__":
    torch.manual_seed(1)
    data = [(torch.randn(3, WIDTH), torch.randn(3, WIDTH)) for _ in range(8)]
    step = partial(replicated, fault="not reduced")
    verdict = validate(step, reference=build_model, microbatches=data, ranks=REPLICAS, loss_fn=nn.functional.mse_loss)
    print(verdict)
    sys.exit(verdict.exit_status)
