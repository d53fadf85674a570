"""What ``fully_shard`` made of a module is taken away in a copy, and computes the same."""

from abc import ABC

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pipeproof.reference.unsharded import is_flat, is_wrapped, unshard
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

BF16, FP32 = torch.bfloat16, torch.float32


class Norm(nn.Module, ABC):  # of such, torch makes a class that does not tell that it is torch's
    """A part with a buffer and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("by", torch.full((4,), 0.5))

    def forward(self, x: Tensor, *, times: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.inner(x))) * self.by * times


def compared(context: RankContext, policy: MixedPrecisionPolicy, inside: bool) -> list[bool]:
    mesh = init_device_mesh("cpu", (context.ranks,))
    torch.manual_seed(0)
    module = Norm()
    if inside:
        fully_shard(module.inner, mesh=mesh, mp_policy=policy)
    module = fully_shard(module, mesh=mesh, mp_policy=policy)
    whole = {name: one.full_tensor() for name, one in module.named_parameters()}  # type: ignore[attr-defined]
    made = unshard(module, whole)
    x, times = torch.randn(2, 4), torch.randn(2, 4)
    ours, theirs = made(x, times=times), module(x, times=times)
    ours.sum().backward()
    theirs.sum().backward()
    pairs = [(one.grad, made.get_parameter(name).grad) for name, one in module.named_parameters()]
    same = [torch.equal(one.full_tensor(), other.to(one.dtype)) for one, other in pairs]  # type: ignore[union-attr]
    kinds = [is_wrapped(module), not any(map(is_wrapped, made.modules())), isinstance(made, Norm), not is_flat(module)]
    return [torch.equal(ours, theirs), ours.dtype == theirs.dtype, made.by is module.by, *same, *kinds]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(BF16, FP32),
        MixedPrecisionPolicy(BF16, FP32, FP32),
        MixedPrecisionPolicy(BF16, FP32, FP32, cast_forward_inputs=True),
    ],
)
def test_a_stage_put_together_computes_what_its_parts_do(
    policy: MixedPrecisionPolicy, inside: bool, simulated: World
) -> None:
    for found in simulated.run(compared, policy, inside, ranks=2):
        assert all(found), found
