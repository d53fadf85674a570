import sys
from functools import partial

import torch
from my_pipeline import build_model, loss_fn
from my_training import my_training, sgd

from pipeproof import Contract, whitebox

if __name__ == "__main__":
    torch.manual_seed(1)
    data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(8)]
    forgetful = partial(my_training, clear=False)
    verdict = whitebox.validate(
        forgetful,
        reference=build_model,
        microbatches=data,
        ranks=2,
        loss_fn=loss_fn,
        optimizer=sgd,
        contract=Contract(operations=["train", "train"]),
    )
    print(verdict)
    sys.exit(verdict.exit_status)
