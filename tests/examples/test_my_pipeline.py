import torch
from my_pipeline import OneFOneB, build_model, loss_fn  # your own code

from pipeproof import watch


def my_step(model, microbatches):
    stage = watch(model[2 * torch.distributed.get_rank() :][:2])  # the layers of this rank
    return stage, OneFOneB(stage, microbatches).step()


def test_my_pipeline(whitebox):
    torch.manual_seed(0)
    data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(4)]
    whitebox.validate(my_step, reference=build_model, microbatches=data, ranks=2, loss_fn=loss_fn).raise_if_failed()
