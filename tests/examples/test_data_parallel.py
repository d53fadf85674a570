"""An example of a pipeline whose stages are in DDP."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from pipeproof import PipelineSchedule
from pipeproof.whitebox import WhiteBox


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


loss_fn = nn.functional.mse_loss


def my_step(model: nn.Sequential, microbatches: list) -> tuple:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_group("pp"), mesh.get_group("dp")
    stage = model[2 * pp.rank() : 2 * pp.rank() + 2]
    module = DistributedDataParallel(stage, process_group=dp)
    own = {"n_microbatches": len(microbatches), "stages": [module], "pp_group": pp}
    result = PipelineSchedule(kind="ZB-H1", loss_fn=loss_fn, **own).train_step(microbatches)
    return stage, result.losses, result.grad_norm


def test_my_data_parallel_pipeline(whitebox: WhiteBox) -> None:
    torch.manual_seed(1)
    data = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(8)]
    verdict = whitebox.validate(my_step, reference=build_model, microbatches=data, ranks=[0, 1, 0, 1], loss_fn=loss_fn)
    verdict.raise_if_failed()
