"""Groups that are given back are forgotten: a mesh of later groups is not taken for the one before."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.frameworks.engines import groups


def norms(context: RankContext, forget: bool) -> list[float]:
    """Of a tensor in shards, each time on a mesh of its own group."""
    if not forget:
        groups.forget_meshes = lambda: None
    made = []
    for _ in range(3):
        with groups.groups_given_back():
            mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu", mesh_dim_names=("dp",))
            whole = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
            made.append(float(torch.nn.utils.get_total_norm([whole, whole * 2]).full_tensor()))
    return made


@pytest.mark.pipeproof_ranks
def test_results_are_on_the_mesh_of_today() -> None:
    with World() as world:
        for made in world.run(norms, True, ranks=2, timeout_s=60):
            assert made == pytest.approx([70**0.5] * 3)


@pytest.mark.pipeproof_ranks
def test_torch_remembers_the_mesh_before() -> None:
    """Else ``forget_meshes`` is for nothing."""
    with World() as world, pytest.raises(RankFailed, match="Could not resolve the process group"):
        world.run(norms, False, ranks=2, timeout_s=60)
