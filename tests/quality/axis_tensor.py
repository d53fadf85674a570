"""Tensor and sequence parallelism: faults, and what is as right."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from axis_planting import (
    Change,
    Plant,
    Times,
    applied,
    finished,
    having,
    in_second_stage,
    summed,
    times,
    whole_or_shard,
    wrapped,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from pipeproof.wings.primitives import tensor_parallel
from tests.support.tensor_parallel import SummedBack


def for_style(name: str, style: Any) -> Change:
    """The plan of a block has ``style`` for the module ``name``."""
    return lambda right: lambda: {**right(), name: style()}


class Unreduced(ColwiseParallel):
    """The gradient of its input stays what this rank has of it."""

    @staticmethod
    def _prepare_input_fn(input_layouts: Any, desired: Any, mod: Any, inputs: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, input_layouts, run_check=False, grad_placements=[Partial()])


class Averaged(ColwiseParallel):
    """The gradient of its input is the mean of what ranks have."""

    @staticmethod
    def _prepare_input_fn(input_layouts: Any, desired: Any, mod: Any, inputs: Any, mesh: DeviceMesh) -> Any:
        scaled = Times.apply(inputs[0], 1 / mesh.size())
        return ColwiseParallel._prepare_input_fn(input_layouts, desired, mod, (scaled,), mesh)


def unreduced_output(right: Any) -> Any:
    def prepared(layouts: Any, use_local: Any, mod: Any, outputs: Any, mesh: DeviceMesh) -> Any:
        alone = isinstance(mod, nn.Linear)
        return outputs.to_local() if alone else right(layouts, use_local, mod, outputs, mesh)

    return staticmethod(prepared)


def reduced_twice(right: Any) -> Any:
    def prepared(layouts: Any, use_local: Any, mod: Any, outputs: Any, mesh: DeviceMesh) -> Any:
        return right(layouts, use_local, mod, outputs, mesh) * mesh.size()

    return staticmethod(prepared)


def with_bias_of_each(right: Any) -> Any:
    """Every rank adds the bias to its part of the sum."""

    def prepared(layouts: Any, use_local: Any, mod: Any, outputs: Any, mesh: DeviceMesh) -> Any:
        made = right(layouts, use_local, mod, outputs, mesh)
        bias = getattr(mod, "bias", None)
        return made if bias is None else made + (mesh.size() - 1) * bias.to_local()

    return staticmethod(prepared)


class OwnSlice(torch.autograd.Function):
    """The whole sequence; of its gradient this rank takes its own part as it is."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        return given[0].chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)], None


def gathered_alone(right: Any) -> Any:
    def prepared(self: Any, inputs: Any, device_mesh: DeviceMesh) -> Any:
        part = inputs[0].to_local() if isinstance(inputs[0], DTensor) else inputs[0]
        whole = OwnSlice.apply(part, device_mesh.get_group())
        return (DTensor.from_local(whole, device_mesh, [Replicate()], run_check=False, grad_placements=[Partial()]),)

    return prepared


def weights_of_neighbour(module: Any, mesh: DeviceMesh) -> None:
    """The shards of one weight are loaded on the other rank."""
    own = module[1].feedforward.up.weight.data.to_local()
    parts = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(parts, own.contiguous(), group=mesh.get_group())
    own.copy_(parts[1 - mesh.get_local_rank()])


def partial_sums_kept(chosen: Callable[[str], bool]) -> Callable[[nn.Module, DeviceMesh], None]:
    """Partial sums of whole parameters are taken for sums."""

    def keep(stage: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in stage.named_parameters():
            gradient = parameter.grad
            if chosen(name) and isinstance(gradient, DTensor):
                parameter.grad = DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()])

    return keep


class ReducedByHand(ColwiseParallel):
    """The gradient of its input is reduced by ``SummedBack``."""

    @staticmethod
    def _prepare_input_fn(input_layouts: Any, desired: Any, mod: Any, inputs: Any, mesh: DeviceMesh) -> Any:
        given = (SummedBack.apply(inputs[0], mesh.get_group()),)
        return Unreduced._prepare_input_fn(input_layouts, desired, mod, given, mesh)


def reduced_in_fp64(right: Any) -> Any:
    def prepared(layouts: Any, use_local: Any, mod: Any, outputs: Any, mesh: DeviceMesh) -> Any:
        if not isinstance(mod, nn.Linear):
            return right(layouts, use_local, mod, outputs, mesh)
        return right(layouts, use_local, mod, outputs.double(), mesh).float()

    return staticmethod(prepared)


def sums_of_partial(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Partial sums are added up by hand."""
    for parameter in stage.parameters():
        if isinstance(parameter.grad, DTensor):
            parameter.grad = whole_or_shard(parameter.grad)


IN_BLOCK = "of_block"
FAULTS: Mapping[str, Sequence[Plant]] = {
    "input gradients not reduced": (wrapped(tensor_parallel, IN_BLOCK, for_style("feedforward.up", Unreduced)),),
    "queries' input gradients not reduced": (
        wrapped(tensor_parallel, IN_BLOCK, for_style("attention.queries", Unreduced)),
    ),
    "mean of input gradients": (wrapped(tensor_parallel, IN_BLOCK, for_style("feedforward.up", Averaged)),),
    "outputs not reduced": (wrapped(RowwiseParallel, "_prepare_output_fn", unreduced_output),),
    "outputs reduced twice": (wrapped(RowwiseParallel, "_prepare_output_fn", reduced_twice),),
    "bias of each rank": (wrapped(RowwiseParallel, "_prepare_output_fn", with_bias_of_each),),
    "norms reduced again": (finished("tp", summed(having("norm"))),),
    "shards of a weight exchanged": (applied("tp", weights_of_neighbour),),
    "all times tp": (finished("tp", times(0)),),
    "norms in parts": (finished("sp", partial_sums_kept(having("norm"))),),
    "norms averaged": (finished("sp", times(-1, having("norm"))),),
    "gathered without reduction": (wrapped(PrepareModuleInput, "_prepare_input_fn", gathered_alone),),
    "input gradients not reduced in the second stage": (
        wrapped(tensor_parallel, IN_BLOCK, in_second_stage(for_style("feedforward.up", Unreduced))),
    ),
}

SOUND: Mapping[str, Sequence[Plant]] = {
    "outputs added in fp64": (wrapped(RowwiseParallel, "_prepare_output_fn", reduced_in_fp64),),
    "input gradients reduced by hand": (
        wrapped(tensor_parallel, IN_BLOCK, for_style("feedforward.up", ReducedByHand)),
    ),
    "norms added up by hand": (finished("sp", sums_of_partial),),
}
