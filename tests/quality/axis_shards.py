"""Data, tensor and sequence parallelism, and shards: faults, and what is as right."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from axis_planting import (
    Change,
    Plant,
    Times,
    applied,
    every,
    finished,
    gradients,
    having,
    in_part,
    in_second_stage,
    on,
    summed,
    times,
    unless,
    whole_or_shard,
    wrapped,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel

from pipeproof.wings.primitives import data_parallel, stacked, tensor_parallel
from tests.support.tensor_parallel import SummedBack


def hooked(hook: Any) -> Callable[[Any, DeviceMesh], None]:
    """DDP reduces its buckets by ``hook``."""
    return lambda module, mesh: module.register_comm_hook(None, hook)


Reduced = torch.futures.Future[Tensor]


def reduced_by(divisor: float, dtype: torch.dtype = torch.float32) -> Any:
    """The sum over all replicas, in ``dtype``, of what is divided first."""

    def hook(state: object, bucket: dist.GradBucket) -> Reduced:
        sent = (bucket.buffer() / divisor).to(dtype)
        work = dist.all_reduce(sent, async_op=True)
        return work.get_future().then(lambda done: done.value()[0].to(bucket.buffer().dtype))

    return hook


def of_rank_0(state: object, bucket: dist.GradBucket) -> Reduced:
    """The gradients of one replica for all."""
    return dist.broadcast(bucket.buffer(), 0, async_op=True).get_future().then(lambda done: done.value()[0])


def same_along(*axes: str) -> Change:
    """The microbatches of the first rank for all along ``axes``, or along the only one."""

    def share(right: Any, microbatch: Any, mesh: DeviceMesh) -> Any:
        for group in [mesh[axis].get_group() for axis in axes] if axes else [mesh.get_group()]:
            for tensor in microbatch:
                dist.broadcast(tensor, dist.get_process_group_ranks(group)[0], group=group)
        return microbatch

    return share


def ignored(name: str) -> Change:
    """DDP is told to leave this parameter alone."""

    def apply(right: Any, stage: nn.Module, mesh: DeviceMesh) -> Any:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, [name])
        return right(stage, mesh)

    return apply


def in_all_but_last(right: Any, module: Any, last: bool) -> Any:
    return right(module, not last)


def loss_of_one_replica_twice(right: Any, module: Any, microbatches: Any, divisor: float, parts: Any) -> Any:
    return right(module, microbatches, divisor / (1 + dist.get_rank() % 2), parts)


def each_shard_divided_by(divisor: Callable[[DeviceMesh], float]) -> Callable[[Any, DeviceMesh], None]:
    def change(module: Any, mesh: DeviceMesh) -> None:
        for one in module.modules():
            if isinstance(one, FSDPModule):
                one.set_force_sum_reduction_for_comms(True)  # gloo has no other
                one.set_gradient_divide_factor(divisor(mesh))

    return change


def copies_apart(right: Any, module: Any, last: bool) -> Any:
    found = right(module, last)
    module.set_requires_all_reduce(False)
    return found


def never_reduced(right: Any, module: Any, last: bool) -> Any:
    return module.set_requires_gradient_sync(False) or nullcontext()


def reduced_in_bf16(right: Any, *given: Any, **more: Any) -> Any:
    return right(*given, **more, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


def exchange(own: Tensor, mesh: DeviceMesh) -> None:
    """Two ranks have each other's."""
    parts = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(parts, own.contiguous(), group=mesh.get_group())
    own.copy_(parts[1 - mesh.get_local_rank()])


def neighbours_exchanged(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Every rank has the shard of the other, where these are of one size."""
    for gradient in gradients(stage):
        exchange(gradient, mesh)


def added_in_reverse(state: object, bucket: dist.GradBucket) -> Reduced:
    """The mean over replicas, the last of them first."""
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, bucket.buffer())
    done = Reduced()
    done.set_result(sum(parts[::-1], torch.zeros_like(parts[0])) / len(parts))
    return done


def for_style(name: str, style: Any) -> Change:
    """The plan of a block has ``style`` for the module ``name``."""
    return lambda right: {**right(), name: style()}


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


def output_as(make: Callable[[Any, Any, DeviceMesh], Any]) -> Plant:
    """What ``make`` makes, of what is right, of the module, and of the mesh, is put out."""

    def prepared(right: Any, layouts: Any, use_local: Any, mod: Any, outputs: Any, mesh: DeviceMesh) -> Any:
        return make(right(layouts, use_local, mod, outputs, mesh), mod, mesh)

    return wrapped(RowwiseParallel, "_prepare_output_fn", prepared)


def with_bias_of_each(made: Any, mod: Any, mesh: DeviceMesh) -> Any:
    """Every rank adds the bias to its part of the sum."""
    bias = getattr(mod, "bias", None)
    return made if bias is None else made + (mesh.size() - 1) * bias.to_local()


def unreduced_output(right: Any, layouts: Any, use_local: Any, mod: Any, outputs: Any, mesh: DeviceMesh) -> Any:
    return outputs.to_local() if isinstance(mod, nn.Linear) else right(layouts, use_local, mod, outputs, mesh)


def reduced_in_fp64(right: Any, layouts: Any, use_local: Any, mod: Any, outputs: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(mod, nn.Linear):
        return right(layouts, use_local, mod, outputs, mesh)
    return right(layouts, use_local, mod, outputs.double(), mesh).float()


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


def gathered_alone(right: Any, style: Any, inputs: Any, device_mesh: DeviceMesh) -> Any:
    part = inputs[0].to_local() if isinstance(inputs[0], DTensor) else inputs[0]
    whole = OwnSlice.apply(part, device_mesh.get_group())
    return (DTensor.from_local(whole, device_mesh, [Replicate()], run_check=False, grad_placements=[Partial()]),)


def weights_of_neighbour(module: Any, mesh: DeviceMesh) -> None:
    """The shards of one weight are loaded on the other rank."""
    exchange(module[1].feedforward.up.weight.data.to_local(), mesh)


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


def sums_of_partial(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Partial sums are added up by hand."""
    for parameter in stage.parameters():
        if isinstance(parameter.grad, DTensor):
            parameter.grad = whole_or_shard(parameter.grad)


IN_BLOCK = "of_block"
FAULTS: Mapping[str, Plant] = {
    "never reduced": in_part("ddp", sync=lambda right, module, last: module.no_sync()),
    "never reduced by hand": in_part("ddp", finish=unless(every)),
    "reduced before the last microbatch": in_part("ddp", sync=in_all_but_last),
    "sum over replicas": applied("ddp", hooked(reduced_by(1.0))),
    "divided by replicas twice": applied("ddp", hooked(reduced_by(4.0))),
    "mean summed again": finished("ddp", summed()),
    "one weight ignored": in_part("ddp", apply=ignored("1.feedforward.up.weight")),
    "same data for all": in_part("ddp", share=same_along()),
    "same data in all shards": in_part("zero-3", share=same_along()),
    "same data in all shards and copies": in_part("hsdp", share=same_along("dp_shard", "dp_replicate")),
    "same data in the shards of a copy": in_part("hsdp", share=same_along("dp_shard")),
    "one rank halves its shards": finished("hsdp", times(0.5, on(every, 1))),
    "gradients of rank 0": applied("ddp", hooked(of_rank_0)),
    "one replica counts twice": wrapped(stacked, "accumulate", loss_of_one_replica_twice),
    "reduced in bf16": applied("ddp", hooked(reduced_by(2.0, torch.bfloat16))),
    "sum of shards": applied("zero-3", each_shard_divided_by(lambda mesh: 1.0)),
    "shards divided twice": applied("zero-3", each_shard_divided_by(lambda mesh: 2.0 * mesh.size())),
    "shards never reduced": in_part("zero-3", sync=never_reduced),
    "shards reduced before the last": in_part("zero-3", sync=in_all_but_last),
    "shards exchanged": finished("zero-3", neighbours_exchanged),
    "shards reduced in bf16": wrapped(data_parallel, "fully_shard", reduced_in_bf16),
    "copies of shards not reduced": in_part("hsdp", apply=lambda right, stage, mesh: right(stage, mesh["dp_shard"])),
    "copies of shards wait": in_part("hsdp", sync=copies_apart),
    "one weight on one line of dp": in_part("ddp", finish=unless(on(having("1.feedforward.up.weight"), 0, 2))),
    "first stage not reduced": in_part("ddp", finish=unless(on(every, 0, 1, 2, 3))),
    "input gradients not reduced": wrapped(tensor_parallel, IN_BLOCK, for_style("feedforward.up", Unreduced)),
    "queries' input gradients not reduced": wrapped(
        tensor_parallel, IN_BLOCK, for_style("attention.queries", Unreduced)
    ),
    "mean of input gradients": wrapped(tensor_parallel, IN_BLOCK, for_style("feedforward.up", Averaged)),
    "outputs not reduced": wrapped(RowwiseParallel, "_prepare_output_fn", unreduced_output),
    "outputs reduced twice": output_as(lambda made, mod, mesh: made * mesh.size()),
    "bias of each rank": output_as(with_bias_of_each),
    "norms reduced again": finished("tp", summed(having("norm"))),
    "shards of a weight exchanged": applied("tp", weights_of_neighbour),
    "all times tp": finished("tp", times(0)),
    "norms in parts": finished("sp", partial_sums_kept(having("norm"))),
    "norms averaged": finished("sp", times(-1, having("norm"))),
    "gathered without reduction": wrapped(PrepareModuleInput, "_prepare_input_fn", gathered_alone),
    "input gradients not reduced in the second stage": wrapped(
        tensor_parallel, IN_BLOCK, in_second_stage(for_style("feedforward.up", Unreduced))
    ),
}

SOUND: Mapping[str, Plant] = {
    "small buckets": in_part("ddp", apply=lambda right, *given: right(*given, bucket_cap_mb=0.001)),
    "gradients are views of buckets": in_part(
        "ddp", apply=lambda right, *given: right(*given, gradient_as_bucket_view=True)
    ),
    "divided first": applied("ddp", hooked(reduced_by(2.0))),
    "reduced in fp64": applied("ddp", hooked(reduced_by(2.0, torch.float64))),
    "added in reverse": applied("ddp", hooked(added_in_reverse)),
    "reduced in every backward": in_part("ddp", sync=lambda right, module, last: nullcontext()),
    "shards divided first": applied("zero-3", each_shard_divided_by(lambda mesh: float(mesh.size()))),
    "shards reduced in every backward": in_part("zero-3", sync=lambda right, module, last: right(module, True)),
    "shards kept whole": in_part("zero-3", apply=lambda right, *given: right(*given, reshard=False)),
    "outputs added in fp64": wrapped(RowwiseParallel, "_prepare_output_fn", reduced_in_fp64),
    "input gradients reduced by hand": wrapped(tensor_parallel, IN_BLOCK, for_style("feedforward.up", ReducedByHand)),
    "norms added up by hand": finished("sp", sums_of_partial),
}
