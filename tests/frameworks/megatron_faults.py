"""Faults at Megatron-core's real places, each from its public history: a step of the tiny GPTModel with one of them."""

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, param_and_grad_buffer
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from pipeproof import StepResult
from pipeproof.wings.adapters.megatron_whole import bare
from tests.frameworks.engines import tiny_gpt
from tests.frameworks.engines.megatron_layout import MegatronLayout as Layout
from tests.frameworks.fault import Fault, in_place_of, left_out, patched, planted

Train = Callable[..., None]
FINALIZING = sys.modules["megatron.core.distributed.finalize_model_grads"]  # the package's name for it is a function's


def divided_by(divisor: Callable[[int], int], stack: ExitStack) -> None:
    def calc_loss(right: Any, *given: Any, **named: Any) -> Any:
        return right(*given[:6], divisor(given[6]), *given[7:], **named)

    patched(stack, schedules, "forward_step_calc_loss", calc_loss)


@in_place_of(tiny_gpt, "train_step")
def not_finalized(right: Train, forward: Any, data: Any, chunks: list[Any], *more: Any) -> None:
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = None
    right(forward, data, chunks, *more)


@in_place_of(tiny_gpt, "train_step")
def other_stream(right: Train, forward: Any, data: Any, *more: Any) -> None:
    """The last stage reads one microbatch ahead."""
    every = list(data)
    right(forward, iter(every[1:] + every[:1] if parallel_state.is_pipeline_last_stage() else every), *more)


def stale_buffer(stack: ExitStack) -> None:
    """What comes for microbatch 2 is what came for 1: its buffer is used before the message is there."""
    came: list[Tensor] = []

    def received(right: Any, *given: Any, **named: Any) -> Any:
        made = right(*given, **named)
        tensor = made[0] if isinstance(made, list) else made
        if tensor is not None:
            came.append(tensor)
            if len(came) == 3:
                tensor.data.copy_(came[1].data)
        return made

    for name in ("recv_forward", "send_backward_recv_forward"):
        patched(stack, P2PCommunicator, name, received)


def last_in_first_out(stack: ExitStack) -> None:
    name = "forward_backward_pipelining_without_interleaving"
    text, space = inspect.getsource(getattr(schedules, name)), dict(vars(schedules))
    assert text.count(".pop(0)") == 4
    exec(compile(text.replace(".pop(0)", ".pop()"), "wrong_schedule.py", "exec"), space)
    stack.enter_context(mock.patch.object(schedules, name, space[name]))


@in_place_of(tiny_gpt, "train_step")
def other_chunk(right: Train, forward: Any, data: Any, chunks: list[Any], *more: Any) -> None:
    """Rank 1 runs its second chunk in place of its first."""
    first, second = chunks[:2]

    def wrong(data: Any, model: Any) -> Any:
        if model is not first or dist.get_rank() != 1:
            return forward(data, model)
        bare(second).set_input_tensor([bare(first).decoder.input_tensor])
        return forward(data, second)

    right(wrong, data, chunks, *more)


def norm_of_one_stage(stack: ExitStack) -> None:
    def own(right: Any, grads: Any, norm_type: Any = 2, grad_stats_parallel_group: Any = None) -> Any:
        return right(grads, norm_type, parallel_state.get_tensor_model_parallel_group())

    assert optimizers.get_grad_norm_fp32 is clip_grads.get_grad_norm_fp32
    patched(stack, optimizers, "get_grad_norm_fp32", own)


@in_place_of(tiny_gpt, "train_step")
def not_cleared(right: Train, forward: Any, data: Any, chunks: list[Any], *more: Any) -> None:
    """Weights, which were gathered through the gradients' buffer, are left in it."""
    for parameter in chunks[0].parameters():
        parameter.main_grad.copy_(parameter.data)
    with mock.patch.object(type(chunks[0]), "zero_grad_buffer"):
        right(forward, data, chunks, *more)


@in_place_of(param_and_grad_buffer._ParamAndGradBucket, "__init__")
def summed_over_replicas(right: Any, bucket: Any, *given: Any, **named: Any) -> None:
    """Gradients of replicas are not divided by their number."""
    right(bucket, *given, **named)
    bucket.gradient_scaling_factor = 1.0


@in_place_of(param_and_grad_buffer, "shard_buffer")
def other_shard(right: Any, *given: Any) -> Any:
    """Every rank has the shard reduced that is the next rank's."""
    made = right(*given)
    return made[1:] + made[:1]


@in_place_of(dist, "all_reduce")
def tokens_of_one_replica(right: Any, tensor: Tensor, *given: Any, **named: Any) -> Any:
    """Gradients are divided by the tokens of a replica, not of all."""
    return None if tensor.dtype == torch.int else right(tensor, *given, **named)


@in_place_of(distrib_optimizer.DistributedOptimizer, "_copy_model_grads_to_main_grads")
def shard_zeroed(right: Any, optimizer: Any) -> None:
    """The optimizer loses what it was given of the largest weight of rank 0's shard, once gradients are complete."""
    right(optimizer)
    if dist.get_rank() == 0:
        max((one.grad for group in optimizer.shard_fp32_groups for one in group), key=Tensor.numel).zero_()


def hooked(stack: ExitStack, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
    """What is done to a parameter around the hook that adds its ``.grad`` to its ``main_grad``, on the last stage."""

    def made(right: Any, ddp: Any, parameter: Any) -> Any:
        hook = right(ddp, parameter)

        def wrong(*given: Any) -> None:
            before(parameter)
            hook(*given)
            after(parameter)

        return wrong if parallel_state.is_pipeline_last_stage() else hook

    patched(stack, DistributedDataParallel, "_make_backward_post_hook", made)


def nothing(_: Any) -> None:
    """The hook is left as it is."""


def to_bf16(parameter: Any) -> None:
    parameter.main_grad.copy_(parameter.main_grad.bfloat16())


def added_in_bf16(stack: ExitStack) -> None:
    """Every sum is rounded to bf16: the buffer has fp32, what adds has not."""
    hooked(stack, nothing, to_bf16)


@in_place_of(tiny_gpt, "finalize_model_grads")
def cast_to_bf16(right: Any, chunks: list[Any], *given: Any, **named: Any) -> None:
    """Gradients that were added up in fp32 go through bf16 once, when they are complete."""
    right(chunks, *given, **named)
    for chunk in chunks if parallel_state.is_pipeline_last_stage() else []:
        for parameter in chunk.parameters():
            to_bf16(parameter)


def added_again(stack: ExitStack) -> None:
    """The hook adds what the backward has already put into ``main_grad``, as a fused kernel does."""
    hooked(stack, lambda one: one.main_grad.add_(one.grad), nothing)


@in_place_of(tiny_gpt, "optimizer_of")
def scaled_otherwise(right: Any, layout: Layout, chunks: list[Any]) -> Any:
    """Losses are multiplied by twice what the optimizer divides gradients by."""
    made = right(layout, chunks)
    for chunk in chunks:
        chunk.config.grad_scale_func = lambda loss: 2 * made.scale_loss(loss)
    return made


def as_it_is(stack: ExitStack) -> None:
    """Nothing is planted: messages between two ranks cross in Megatron-core 0.16.1 itself."""


EACH_STAGE = ("stage 0", "stage 1")
SHARDS = tuple(
    f"stage {stage}, parameter model.decoder.layers.{name}.weight"
    for stage, name in enumerate(("0.mlp.linear_fc2", "3.self_attention.linear_proj"))
)
FAULTS = {
    "not-divided": Fault(partial(divided_by, lambda count: 1), Layout(), "scale"),
    "divided-twice": Fault(partial(divided_by, lambda count: count * count), Layout(), "scale"),
    "tied-not-reduced": Fault(
        left_out(FINALIZING, "_allreduce_word_embedding_grads"),
        Layout(tied=True),
        "tied-not-summed",
        ("parameter model.embedding.word_embeddings.weight",),
    ),
    "not-finalized": Fault(not_finalized, Layout(dp=2), "not-reduced", EACH_STAGE),
    "other-stream": Fault(
        other_stream, Layout(), "swapped-data", ("rank 0, stage 0, microbatches 0, 1, 2, 3, action 0F1",)
    ),
    "stale-buffer": Fault(stale_buffer, Layout(), "mispaired", ("rank 1, stage 1, microbatch 2, action 1F2",)),
    "last-in-first-out": Fault(
        last_in_first_out, Layout(), "mispaired", ("rank 0, stage 0, microbatches 0, 1, 2, 3, action 0B1",)
    ),
    "other-chunk": Fault(other_chunk, Layout(vp=3, layers=6, p2p_overlap=True), "zero", ("rank 1, stage 1",)),
    "norm-counts-copies": Fault(
        in_place_of(optimizers, "param_is_not_shared")(lambda *_: True), Layout(tied=True, optimizer=True), "norm"
    ),
    "norm-of-one-stage": Fault(norm_of_one_stage, Layout(optimizer=True), "norm", ("everywhere",)),
    "not-cleared": Fault(not_cleared, Layout(), "extra-term"),
    "summed-over-replicas": Fault(summed_over_replicas, Layout(dp=2), "scale"),
    "other-shard": Fault(other_shard, Layout(dp=2, distributed=True), "not-reduced", SHARDS),
    "tokens-of-one-replica": Fault(  # one cause for each rank: those of a replica divide by another number
        tokens_of_one_replica,
        Layout(dp=2, three=True, per_token=True),
        "scale",
        ("rank 0, stage 0", "rank 1, stage 0", "rank 2, stage 1", "rank 3, stage 1"),
    ),
    "crossed-messages": Fault(
        as_it_is,
        Layout(vp=2),
        "wrong-message",
        ("rank 1, stage 1, microbatches 2, 3, action 1F2", "rank 1, stage 1, microbatches 0, 1, action 1B0"),
    ),
}
BF16 = Layout(bf16=True, optimizer=True)
ROUNDED = "rank 1, stage 1, parameter model.decoder.final_layernorm.weight"  # and others, in words
FAULTS |= {
    "added-in-bf16": Fault(added_in_bf16, BF16, "rounded", (ROUNDED,)),
    "cast-to-bf16": Fault(cast_to_bf16, BF16, "rounded", (ROUNDED,)),
    "added-again": Fault(added_again, BF16, "scale", ("rank 1, stage 1",)),
    "scaled-otherwise": Fault(scaled_otherwise, replace(BF16, scaled=True), "scale"),
    "not-finalized-in-bf16": Fault(not_finalized, replace(BF16, dp=2), "not-reduced", EACH_STAGE),
}
PLANTS = {name: one.plant for name, one in FAULTS.items()} | {"shard-zeroed": shard_zeroed}  # of no known cause


def step(fault: str, layout: Layout, model: Any, microbatches: list[Any]) -> StepResult:
    """The step of ``tiny_gpt``, wrong."""
    return planted(FAULTS[fault].plant, tiny_gpt.step, layout, model, microbatches)
