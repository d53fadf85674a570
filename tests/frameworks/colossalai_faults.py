"""Faults at ColossalAI's real places: a step of the tiny model with one of them."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

from colossalai.booster.plugin import hybrid_parallel_plugin as plugin
from colossalai.pipeline.schedule._utils import get_micro_batch
from colossalai.pipeline.schedule.interleaved_pp import InterleavedSchedule
from colossalai.pipeline.schedule.one_f_one_b import OneForwardOneBackwardSchedule
from colossalai.zero.low_level import LowLevelZeroOptimizer
from torch import Tensor, nn

from pipeproof import StepResult
from tests.frameworks import tiny_colossal
from tests.frameworks.fault import Fault, in_place_of, left_out, patched, planted
from tests.frameworks.tiny_colossal import Layout

MODEL = plugin.HybridParallelModule


@in_place_of(OneForwardOneBackwardSchedule, "forward_step")
def not_divided(right: Any, schedule: Any, *given: Any) -> Any:
    made = right(schedule, *given)
    return made * schedule.num_microbatches if isinstance(made, Tensor) else made


@in_place_of(OneForwardOneBackwardSchedule, "backward_step")
def divided_at_each_stage(right: Any, schedule: Any, optimizer: Any, given: Any, made: Any, gradient: Any) -> Any:
    """What flows back is divided as if it were the loss."""
    divided = gradient and {key: one / schedule.num_microbatches for key, one in gradient.items()}
    return right(schedule, optimizer, given, made, divided)


@in_place_of(MODEL, "sync_dp_grads")
def summed_over_replicas(right: Any, model: Any) -> None:
    right(model)
    for one in model.module.parameters():
        one.grad *= model.dp_group.size()


@in_place_of(OneForwardOneBackwardSchedule, "forward_step")
def other_labels(right: Any, schedule: Any, model: Any, given: Any, criterion: Any, *more: Any) -> Any:
    """The criterion is given the microbatch after that of the outputs."""

    def wrong(outputs: Any, _: Any) -> Tensor:
        start = schedule.microbatch_offset % schedule.batch_size
        loss: Tensor = criterion(outputs, get_micro_batch(schedule.batch, start, schedule.microbatch_size))
        return loss

    return right(schedule, model, given, wrong, *more)


@in_place_of(OneForwardOneBackwardSchedule, "load_batch")
def other_stream(right: Any, schedule: Any, data_iter: Any, *given: Any) -> None:
    """The last stage's batch is in another order, as of a sampler that is not the first stage's."""
    right(schedule, data_iter, *given)
    if schedule.stage_manager.is_last_stage():
        schedule.batch = {key: one.roll(-schedule.microbatch_size, 0) for key, one in schedule.batch.items()}


def stale_buffer(stack: ExitStack) -> None:
    """What comes for microbatch 2 is what came for 1: the buffer is used before the message is there."""
    came: list[Any] = []

    def received(right: Any, schedule: Any, *given: Any, **named: Any) -> Any:
        came.append(right(schedule, *given, **named))
        if len(came) == 2 and came[1] is not None:  # of microbatches 1 and 2; the first was received by itself
            came[1] = {key: one.detach().clone().requires_grad_() for key, one in came[0].items()}
        return came[-1]

    patched(stack, OneForwardOneBackwardSchedule, "send_backward_recv_forward", received)


def stale_gradient(stack: ExitStack) -> None:
    """The first stage runs a backward with the gradient that came for the one before."""
    came: list[Any] = []

    def backward_step(right: Any, schedule: Any, optimizer: Any, given: Any, made: Any, gradient: Any) -> Any:
        if schedule.stage_manager.is_first_stage():
            came.append(gradient)
            gradient = came[0] if len(came) == 2 else gradient
        return right(schedule, optimizer, given, made, gradient)

    patched(stack, OneForwardOneBackwardSchedule, "backward_step", backward_step)


def last_in_first_out(stack: ExitStack) -> None:
    """Backwards take what the latest forward left."""
    left: list[Any] = []

    def forward_step(right: Any, schedule: Any, model: Any, given: Any, *more: Any) -> Any:
        left.append((given, made := right(schedule, model, given, *more)))
        return made

    def backward_step(right: Any, schedule: Any, optimizer: Any, given: Any, made: Any, gradient: Any) -> Any:
        return right(schedule, optimizer, *left.pop(), gradient)

    patched(stack, OneForwardOneBackwardSchedule, "forward_step", forward_step)
    patched(stack, OneForwardOneBackwardSchedule, "backward_step", backward_step)


@in_place_of(InterleavedSchedule, "forward_step")
def other_chunk(right: Any, schedule: Any, *given: Any) -> Any:
    """The last rank runs the layers of its second chunk in place of those of its first."""
    manager = schedule.stage_manager
    ranges = manager.stage_indices
    if manager.is_last_stage(ignore_chunk=True):
        manager.stage_indices = [ranges[-1]] * len(ranges)
    try:
        return right(schedule, *given)
    finally:
        manager.stage_indices = ranges


@in_place_of(plugin.HybridParallelNaiveOptimizer, "_compute_grad_norm")
def norm_of_one_stage(right: Any, optimizer: Any, *given: Any) -> Any:
    with mock.patch.object(optimizer, "pp_size", 1):
        return right(optimizer, *given)


@in_place_of(plugin.HybridParallelNaiveOptimizer, "_compute_grad_norm")
def copies_counted(right: Any, optimizer: Any, *given: Any) -> Any:
    """Every copy of a tied parameter is one of its own to the norm."""
    with mock.patch.object(optimizer, "shared_params", []):
        return right(optimizer, *given)


@in_place_of(LowLevelZeroOptimizer, "_update_unpartitoned_grad")
def other_shard(right: Any, optimizer: Any, store: Any, origin: Any, flat: Any, *given: Any) -> None:
    """Every rank has the shard of the gradients that is the next rank's."""
    right(optimizer, store, origin, [*flat[1:], flat[0]], *given)


FIRST, LAST, EVERY = "rank 0, stage 0", "rank 1, stage 1", "microbatches 0, 1, 2, 3"
SHARDS = tuple(  # each rank has the part of another
    f"rank {rank}, stage {rank % 2}, parameter model.{name}"
    for rank, name in ((0, "words.weight"), (2, "words.weight"), (1, "blocks.5.norm.weight"), (3, "blocks.5.norm.bias"))
)
EACH_STAGE = ("stage 0", "stage 1")
TIED = ("parameter model.words.weight",)
FAULTS = {
    "not-divided": Fault(not_divided, Layout(), "scale"),
    "divided-at-each-stage": Fault(divided_at_each_stage, Layout(), "scale", (f"{FIRST}, action 0B0",)),
    "tied-not-summed": Fault(left_out(MODEL, "sync_shared_params"), Layout(tied=True), "tied-not-summed", TIED),
    "not-reduced": Fault(left_out(MODEL, "sync_dp_grads"), Layout(dp=2), "not-reduced", EACH_STAGE),
    "summed-over-replicas": Fault(summed_over_replicas, Layout(dp=2), "scale"),
    "other-labels": Fault(other_labels, Layout(), "swapped-data", (EVERY,)),
    "other-stream": Fault(
        other_stream, Layout(), "swapped-data", (f"{LAST}, {EVERY}, action 1F0", f"{LAST}, {EVERY}, action 1B0")
    ),
    "stale-buffer": Fault(stale_buffer, Layout(), "mispaired", (f"{LAST}, microbatch 2, action 1F2",)),
    "stale-gradient": Fault(stale_gradient, Layout(), "mispaired", (f"{FIRST}, microbatch 1, action 0B1",)),
    "last-in-first-out": Fault(last_in_first_out, Layout(), "mispaired", (f"{FIRST}, {EVERY}, action 0B1",)),
    "other-chunk": Fault(
        other_chunk, Layout("interleaved", chunks=2), "computation", (f"{LAST}, {EVERY}, action 1F0",)
    ),
    "norm-of-one-stage": Fault(norm_of_one_stage, Layout(), "norm", ("everywhere",)),
    "copies-counted": Fault(copies_counted, Layout(tied=True), "norm"),
    "other-shard": Fault(other_shard, Layout(bf16=True, zero=1, dp=2, tied=True), "misplaced", SHARDS),
}


def step(fault: str, layout: Layout, model: nn.Module, microbatches: list[Any]) -> StepResult:
    """The step of ``tiny_colossal``, wrong."""
    return planted(FAULTS[fault].plant, tiny_colossal.step, layout, model, microbatches)
