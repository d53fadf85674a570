import torch
from my_experts import build_model, my_experts
from my_pipeline import loss_fn

from pipeproof import Contract
from pipeproof.whitebox import WhiteBox


def test_my_experts(whitebox: WhiteBox) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(16, 16), torch.randn(16, 16)) for _ in range(4)]
    verdict = whitebox.validate(
        my_experts, reference=build_model, microbatches=data, ranks=2, loss_fn=loss_fn, contract=Contract(routers="moe")
    )
    verdict.raise_if_failed()
