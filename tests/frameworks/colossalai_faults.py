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
from tests.frameworks.fault import Fault, method, planted
from tests.frameworks.tiny_colossal import Layout


def not_divided(stack: ExitStack) -> None:
    def forward_step(right: Any, schedule: Any, *given: Any) -> Any:
        made = right(schedule, *given)
        return made * schedule.num_microbatches if isinstance(made, Tensor) else made

    method(stack, OneForwardOneBackwardSchedule, "forward_step", forward_step)


def divided_at_each_stage(stack: ExitStack) -> None:
    """What flows back is divided as if it were the loss."""

    def backward_step(right: Any, schedule: Any, optimizer: Any, given: Any, made: Any, gradient: Any) -> Any:
        divided = gradient and {key: one / schedule.num_microbatches for key, one in gradient.items()}
        return right(schedule, optimizer, given, made, divided)

    method(stack, OneForwardOneBackwardSchedule, "backward_step", backward_step)


def tied_not_summed(stack: ExitStack) -> None:
    method(stack, plugin.HybridParallelModule, "sync_shared_params", lambda right, model: None)


def not_reduced(stack: ExitStack) -> None:
    method(stack, plugin.HybridParallelModule, "sync_dp_grads", lambda right, model: None)


def summed_over_replicas(stack: ExitStack) -> None:
    def summed(right: Any, model: Any) -> None:
        right(model)
        for one in model.module.parameters():
            one.grad *= model.dp_group.size()

    method(stack, plugin.HybridParallelModule, "sync_dp_grads", summed)


def other_labels(stack: ExitStack) -> None:
    """The criterion is given the microbatch after that of the outputs."""

    def forward_step(right: Any, schedule: Any, model: Any, given: Any, criterion: Any, *more: Any) -> Any:
        def wrong(outputs: Any, _: Any) -> Tensor:
            start = schedule.microbatch_offset % schedule.batch_size
            loss: Tensor = criterion(outputs, get_micro_batch(schedule.batch, start, schedule.microbatch_size))
            return loss

        return right(schedule, model, given, wrong, *more)

    method(stack, OneForwardOneBackwardSchedule, "forward_step", forward_step)


def other_stream(stack: ExitStack) -> None:
    """The last stage's batch is in another order, as of a sampler that is not the first stage's."""

    def load_batch(right: Any, schedule: Any, data_iter: Any, *given: Any) -> None:
        right(schedule, data_iter, *given)
        if schedule.stage_manager.is_last_stage():
            schedule.batch = {key: one.roll(-schedule.microbatch_size, 0) for key, one in schedule.batch.items()}

    method(stack, OneForwardOneBackwardSchedule, "load_batch", load_batch)


def stale_buffer(stack: ExitStack) -> None:
    """What comes for microbatch 2 is what came for 1: the buffer is used before the message is there."""
    came: list[Any] = []

    def received(right: Any, schedule: Any, *given: Any, **named: Any) -> Any:
        came.append(right(schedule, *given, **named))
        if len(came) == 2 and came[1] is not None:  # of microbatches 1 and 2; the first was received by itself
            came[1] = {key: one.detach().clone().requires_grad_() for key, one in came[0].items()}
        return came[-1]

    method(stack, OneForwardOneBackwardSchedule, "send_backward_recv_forward", received)


def stale_gradient(stack: ExitStack) -> None:
    """The first stage runs a backward with the gradient that came for the one before."""
    came: list[Any] = []

    def backward_step(right: Any, schedule: Any, optimizer: Any, given: Any, made: Any, gradient: Any) -> Any:
        if schedule.stage_manager.is_first_stage():
            came.append(gradient)
            gradient = came[0] if len(came) == 2 else gradient
        return right(schedule, optimizer, given, made, gradient)

    method(stack, OneForwardOneBackwardSchedule, "backward_step", backward_step)


def last_in_first_out(stack: ExitStack) -> None:
    """Backwards take what the latest forward left."""
    left: list[Any] = []

    def forward_step(right: Any, schedule: Any, model: Any, given: Any, *more: Any) -> Any:
        left.append((given, made := right(schedule, model, given, *more)))
        return made

    def backward_step(right: Any, schedule: Any, optimizer: Any, given: Any, made: Any, gradient: Any) -> Any:
        return right(schedule, optimizer, *left.pop(), gradient)

    method(stack, OneForwardOneBackwardSchedule, "forward_step", forward_step)
    method(stack, OneForwardOneBackwardSchedule, "backward_step", backward_step)


def other_chunk(stack: ExitStack) -> None:
    """The last rank runs the layers of its second chunk in place of those of its first."""

    def forward_step(right: Any, schedule: Any, *given: Any) -> Any:
        manager = schedule.stage_manager
        ranges = manager.stage_indices
        if manager.is_last_stage(ignore_chunk=True):
            manager.stage_indices = [ranges[-1]] * len(ranges)
        try:
            return right(schedule, *given)
        finally:
            manager.stage_indices = ranges

    method(stack, InterleavedSchedule, "forward_step", forward_step)


def norm_of_one_stage(stack: ExitStack) -> None:
    def of_stage(right: Any, optimizer: Any, *given: Any) -> Any:
        with mock.patch.object(optimizer, "pp_size", 1):
            return right(optimizer, *given)

    method(stack, plugin.HybridParallelNaiveOptimizer, "_compute_grad_norm", of_stage)


def copies_counted(stack: ExitStack) -> None:
    """Every copy of a tied parameter is one of its own to the norm."""

    def counted(right: Any, optimizer: Any, *given: Any) -> Any:
        with mock.patch.object(optimizer, "shared_params", []):
            return right(optimizer, *given)

    method(stack, plugin.HybridParallelNaiveOptimizer, "_compute_grad_norm", counted)


def other_shard(stack: ExitStack) -> None:
    """Every rank has the shard of the gradients that is the next rank's."""

    def updated(right: Any, optimizer: Any, store: Any, origin: Any, flat: Any, *given: Any) -> None:
        right(optimizer, store, origin, [*flat[1:], flat[0]], *given)

    method(stack, LowLevelZeroOptimizer, "_update_unpartitoned_grad", updated)


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
    "tied-not-summed": Fault(tied_not_summed, Layout(tied=True), "tied-not-summed", TIED),
    "not-reduced": Fault(not_reduced, Layout(dp=2), "not-reduced", EACH_STAGE),
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
