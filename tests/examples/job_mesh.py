"""Write what this job's ranks have: the groups that they are in, and the microbatches that they are given."""

import json

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
axes = {"dp": 2, "pp": 2}
own = {axis: dist.get_process_group_ranks(mesh.get_group(axis)) for axis in axes}
own["microbatches"] = [2 * microbatch for microbatch in range(4)]  # of this rank's data loader

ranks: list = [None] * dist.get_world_size()
dist.all_gather_object(ranks, own)
if dist.get_rank() == 0:
    said = {
        "axes": axes,
        "groups": {axis: sorted({tuple(rank[axis]) for rank in ranks}) for axis in axes},
        "microbatches": [rank["microbatches"] for rank in ranks],
        "sums": [{"over": "dp", "divisor": 2}],
    }
    with open("job.json", "w") as file:
        json.dump({"format": "pipeproof/mesh", "version": 1, **said}, file)
dist.destroy_process_group()
