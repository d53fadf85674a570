"""Data parallelism and shards: faults, and what is as right."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from axis_planting import (
    Change,
    Plant,
    applied,
    finished,
    gradients,
    having,
    in_part,
    on,
    summed,
    times,
    unless,
    wrapped,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from pipeproof.wings.primitives import data_parallel, stacked


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


def same_for_all(right: Any) -> Any:
    def share(microbatch: Any, mesh: DeviceMesh) -> Any:
        for tensor in microbatch:
            dist.broadcast(tensor, dist.get_process_group_ranks(mesh.get_group())[0], group=mesh.get_group())
        return microbatch

    return share


def same_along(*axes: str) -> Change:
    """The microbatches of the first rank for all along ``axes``."""

    def change(right: Any) -> Any:
        def share(microbatch: Any, mesh: DeviceMesh) -> Any:
            for axis in axes:
                same_for_all(right)(microbatch, mesh[axis])
            return microbatch

        return share

    return change


def ignored(*names: str) -> Change:
    """DDP is told to leave these parameters alone."""

    def change(right: Any) -> Any:
        def apply(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, names)
            module: nn.Module = right(stage, mesh)
            return module

        return apply

    return change


def in_no_backward(right: Any) -> Any:
    return lambda module, last: module.no_sync()


def in_all_but_last(right: Any) -> Any:
    return lambda module, last: right(module, not last)


def loss_of_one_replica_twice(right: Any) -> Any:
    def accumulated(module: Any, microbatches: Any, divisor: float, parts: Any) -> Any:
        return right(module, microbatches, divisor / (1 + dist.get_rank() % 2), parts)

    return accumulated


def each_shard_divided_by(divisor: Callable[[DeviceMesh], float]) -> Callable[[Any, DeviceMesh], None]:
    def change(module: Any, mesh: DeviceMesh) -> None:
        for one in module.modules():
            if isinstance(one, FSDPModule):
                one.set_force_sum_reduction_for_comms(True)  # gloo has no other
                one.set_gradient_divide_factor(divisor(mesh))

    return change


def copies_apart(right: Any) -> Any:
    def sync(module: Any, last: bool) -> Any:
        found = right(module, last)
        module.set_requires_all_reduce(False)
        return found

    return sync


def along_shards_alone(right: Any) -> Any:
    return lambda stage, mesh: right(stage, mesh["dp_shard"])


def never_reduced(right: Any) -> Any:
    return lambda module, last: module.set_requires_gradient_sync(False) or nullcontext()


def reduced_in_bf16(right: Any) -> Any:
    return partial(right, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


def neighbours_exchanged(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Every rank has the shard of the other, where these are of one size."""
    for gradient in gradients(stage):
        parts = [torch.empty_like(gradient) for _ in range(mesh.size())]
        dist.all_gather(parts, gradient.contiguous(), group=mesh.get_group())
        gradient.copy_(parts[1 - mesh.get_local_rank()])


def added_in_reverse(state: object, bucket: dist.GradBucket) -> Reduced:
    """The mean over replicas, the last of them first."""
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, bucket.buffer())
    done = Reduced()
    done.set_result(sum(parts[::-1], torch.zeros_like(parts[0])) / len(parts))
    return done


FAULTS: Mapping[str, Sequence[Plant]] = {
    "never reduced": (in_part("ddp", sync=in_no_backward),),
    "never reduced by hand": (in_part("ddp", finish=unless(having(""))),),
    "reduced before the last microbatch": (in_part("ddp", sync=in_all_but_last),),
    "sum over replicas": (applied("ddp", hooked(reduced_by(1.0))),),
    "divided by replicas twice": (applied("ddp", hooked(reduced_by(4.0))),),
    "mean summed again": (finished("ddp", summed()),),
    "one weight ignored": (in_part("ddp", apply=ignored("1.feedforward.up.weight")),),
    "same data for all": (in_part("ddp", share=same_for_all),),
    "same data in all shards": (in_part("zero-3", share=same_for_all),),
    "same data in all shards and copies": (in_part("hsdp", share=same_along("dp_shard", "dp_replicate")),),
    "same data in the shards of a copy": (in_part("hsdp", share=same_along("dp_shard")),),
    "one rank halves its shards": (finished("hsdp", times(0.5, on(having(""), 1))),),
    "gradients of rank 0": (applied("ddp", hooked(of_rank_0)),),
    "one replica counts twice": (wrapped(stacked, "accumulate", loss_of_one_replica_twice),),
    "reduced in bf16": (applied("ddp", hooked(reduced_by(2.0, torch.bfloat16))),),
    "sum of shards": (applied("zero-3", each_shard_divided_by(lambda mesh: 1.0)),),
    "shards divided twice": (applied("zero-3", each_shard_divided_by(lambda mesh: 2.0 * mesh.size())),),
    "shards never reduced": (in_part("zero-3", sync=never_reduced),),
    "shards reduced before the last": (in_part("zero-3", sync=in_all_but_last),),
    "shards exchanged": (finished("zero-3", neighbours_exchanged),),
    "shards reduced in bf16": (wrapped(data_parallel, "fully_shard", reduced_in_bf16),),
    "copies of shards not reduced": (in_part("hsdp", apply=along_shards_alone),),
    "copies of shards wait": (in_part("hsdp", sync=copies_apart),),
    "one weight on one line of dp": (in_part("ddp", finish=unless(on(having("1.feedforward.up.weight"), 0, 2))),),
    "first stage not reduced": (in_part("ddp", finish=unless(on(having(""), 0, 1, 2, 3))),),
}

SOUND: Mapping[str, Sequence[Plant]] = {
    "small buckets": (in_part("ddp", apply=lambda right: partial(right, bucket_cap_mb=0.001)),),
    "gradients are views of buckets": (
        in_part("ddp", apply=lambda right: partial(right, gradient_as_bucket_view=True)),
    ),
    "divided first": (applied("ddp", hooked(reduced_by(2.0))),),
    "reduced in fp64": (applied("ddp", hooked(reduced_by(2.0, torch.float64))),),
    "added in reverse": (applied("ddp", hooked(added_in_reverse)),),
    "reduced in every backward": (in_part("ddp", sync=lambda right: lambda module, last: nullcontext()),),
    "shards divided first": (applied("zero-3", each_shard_divided_by(lambda mesh: float(mesh.size()))),),
    "shards reduced in every backward": (
        in_part("zero-3", sync=lambda right: lambda module, last: right(module, True)),
    ),
    "shards kept whole": (in_part("zero-3", apply=lambda right: partial(right, reshard=False)),),
}
