import torch
from my_pipeline import build_model, loss_fn
from my_training import my_training, sgd

from pipeproof import Contract
from pipeproof.whitebox import WhiteBox

STEPS = ["train", "train", "eval", "accumulate", "train"]


def test_my_training(whitebox: WhiteBox) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(4 * len(STEPS))]
    verdict = whitebox.validate(
        my_training,
        reference=build_model,
        microbatches=data,
        ranks=2,
        loss_fn=loss_fn,
        optimizer=sgd,
        contract=Contract(operations=STEPS),
    )
    verdict.raise_if_failed()
