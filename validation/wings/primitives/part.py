"""A primitive's work on one rank: a few functions, most without effect."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeproof.wings.primitives.layers import Microbatch

Index = tuple[slice, ...]


@dataclass(frozen=True)
class RankPart:
    """One primitive on one rank of ``mesh``, which has only its axes.

    apply: changes a stage in place, and returns its callable, such as a DDP. share: this rank's part of a microbatch.
    sync: around the forward and backward of each microbatch, with a flag for the last. around: a whole step. finish:
    reduces gradients after the last backward. summed: it sums them over its ranks, so each has its share of the loss.
    in_parts: each rank's loss covers its part of every sequence. loss: a microbatch's, from output, target and mesh=,
    if ranks have parts of the output. held: positions of parameters that this rank has in part, as plain tensors.
    update: the optimizer's step, at the end; None: it has no optimizer.
    """

    apply: Callable[[nn.Module, DeviceMesh], nn.Module]
    share: Callable[[Microbatch, DeviceMesh], Microbatch] = lambda microbatch, mesh: microbatch
    sync: Callable[[nn.Module, bool], AbstractContextManager[object]] = lambda module, last: nullcontext()
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    finish: Callable[[nn.Module, DeviceMesh], None] = lambda stage, mesh: None
    summed: bool = False
    in_parts: bool = False
    loss: Callable[..., Tensor] | None = None
    held: Callable[[nn.Module, DeviceMesh], Mapping[nn.Parameter, Index]] = lambda stage, mesh: {}
    update: Callable[[nn.Module, DeviceMesh], None] | None = None
