import sys

import torch
from my_pipeline import build_model, loss_fn
from test_my_pipeline import my_step

from pipeproof import whitebox

if __name__ == "__main__":
    torch.manual_seed(0)
    data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(4)]
    verdict = whitebox.validate(my_step, reference=build_model, microbatches=data, ranks=2, loss_fn=loss_fn)
    print(verdict)
    sys.exit(verdict.exit_status)
