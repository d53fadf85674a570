"""Faults at nanotron's real places: a step of the tiny Llama with one of them."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof import StepResult, nanotron
from tests.frameworks import tiny_llama
from tests.frameworks.fault import Fault, in_place_of, left_out, patched, planted
from tests.frameworks.tiny_llama import Layout, Trainer

with nanotron.imports():
    from nanotron import helpers
    from nanotron import trainer as trainers
    from nanotron.optim.gradient_accumulator import FP32GradientAccumulator
    from nanotron.parallel.parameters import NanotronParameter
    from nanotron.parallel.pipeline_parallel.block import PipelineBlock
    from nanotron.parallel.pipeline_parallel.engine import PipelineEngine
    from nanotron.parallel.pipeline_parallel.p2p import P2P
    from nanotron.parallel.pipeline_parallel.state import PipelineTrainBatchState


@in_place_of(PipelineEngine, "forward")
def not_divided(right: Any, engine: PipelineEngine, *given: Any, **named: Any) -> Any:
    count, engine.nb_microbatches = engine.nb_microbatches, 1
    try:
        return right(engine, *given, **named)
    finally:
        engine.nb_microbatches = count


@in_place_of(PipelineTrainBatchState, "register_send_grad")
def divided_at_each_stage(right: Any, state: PipelineTrainBatchState, grad: Tensor, *given: Any, **named: Any) -> Any:
    """A gradient is divided where a stage hands it on, too."""
    return right(state, grad / 4, *given, **named)


@in_place_of(trainers, "tie_parameters")
def tied_averaged(right: Any, **named: Any) -> Any:
    return right(**{**named, "reduce_op": dist.ReduceOp.AVG})


@in_place_of(trainers, "sync_gradients_across_dp")
def replicas_summed(right: Any, **named: Any) -> Any:
    return right(**{**named, "reduce_op": dist.ReduceOp.SUM})


@in_place_of(PipelineEngine, "_get_bwd_context")
def synced_too_early(right: Any, engine: PipelineEngine, *, nb_backwards: int, **named: Any) -> Any:
    """Replicas are synchronised in the backward before the last."""
    return right(engine, nb_backwards=nb_backwards + 1, **named)


@in_place_of(Trainer, "training_step")
def other_stream(right: Any, trainer: Trainer, dataloader: Iterator[Any]) -> Any:
    """The last stage reads one microbatch ahead."""
    every = list(dataloader)
    last = dist.get_rank(trainer.parallel_context.pp_pg) == trainer.unwrapped_model.output_pp_rank
    return right(trainer, iter(every[1:] + every[:1] if last else every))


def stale_buffer(stack: ExitStack) -> None:
    """What comes for microbatch 2 is what came for 1: its buffer is used before the message is there."""
    came: list[Tensor] = []

    def received(right: Any, *given: Any, **named: Any) -> Any:
        (tensor,) = right(*given, **named)
        if tensor.requires_grad:  # and is no mask
            came.append(tensor)
            if len(came) == 3:
                tensor.data.copy_(came[1].data)
        return [tensor]

    patched(stack, P2P, "recv_tensors", received)


@in_place_of(PipelineTrainBatchState, "pop_last_activations_requiring_backward")
def last_in_first_out(_: Any, state: PipelineTrainBatchState) -> Any:
    """The newest forward is the first to go backward."""
    return state.microbatches_activations_requiring_backward.pop()


def other_block(stack: ExitStack) -> None:
    """The first rank runs its first two layers in the other order."""
    right = PipelineBlock.forward

    def training_step(step: Any, trainer: Trainer, dataloader: Iterator[Any]) -> Any:
        first, second = trainer.unwrapped_model.model.decoder[:2]
        others = {first: second, second: first} if dist.get_rank() == first.rank == second.rank else {}

        def forward(block: PipelineBlock, **named: Any) -> Any:
            return right(others.get(block, block), **named)

        with mock.patch.object(PipelineBlock, "forward", forward):
            return step(trainer, dataloader)

    patched(stack, Trainer, "training_step", training_step)


@in_place_of(trainers, "clip_grad_norm")
def norm_of_one_stage(right: Any, *, mp_pg: Any, **named: Any) -> Any:
    return right(mp_pg=dist.new_group([dist.get_rank()], use_local_synchronization=True), **named)


@in_place_of(trainers, "clip_grad_norm")
def norm_counts_copies(right: Any, **named: Any) -> Any:
    with mock.patch.object(NanotronParameter, "is_tied", False):
        return right(**named)


def clipped_too_early(stack: ExitStack) -> None:
    """Gradients are clipped before those of tied weights are summed."""
    late: list[Any] = []

    def clip(right: Any, **named: Any) -> Any:
        norm = right(**named)
        late.pop()()
        return norm

    def sync(right: Any, **named: Any) -> None:
        late.append(lambda: right(**named))

    patched(stack, trainers, "clip_grad_norm", clip)
    patched(stack, trainers, "sync_tied_weights_gradients", sync)


@in_place_of(Trainer, "training_step")
def not_cleared(right: Any, trainer: Trainer, dataloader: Iterator[Any]) -> Any:
    """Gradients begin with what was in their memory: the weights."""
    for one in trainer.unwrapped_model.parameters():
        one.grad = one.detach().clone()
    return right(trainer, dataloader)


@in_place_of(FP32GradientAccumulator, "_accumulate_grad")
def half_kept(right: Any, sums: Any, name: str, half_param: Any) -> None:
    """A microbatch's gradient is left when it was added to the sum, and is added with the next ones again."""
    grad = half_param.grad
    right(sums, name, half_param)
    half_param.grad = grad


@in_place_of(helpers, "get_fp32_accum_hook")
def last_not_added(right: Any, **named: Any) -> Any:
    """DDP's hook reduces the sums, and does not add the last microbatch's gradients before."""
    hook = right(**named)

    def wrong(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        nothing = [torch.zeros_like(one) for one in bucket.gradients()]
        given = {"parameters": bucket.parameters, "gradients": lambda: nothing, "buffer": bucket.buffer}
        return hook(state, SimpleNamespace(**given))

    return wrong


TIED = ("parameter model.model.token_position_embeddings.pp_block.token_embedding.weight",)
EACH_STAGE = ("stage 0", "stage 1")
FIRST, LAST, ALL = "rank 0, stage 0", "rank 1, stage 1", "microbatches 0, 1, 2, 3"
SUMS = Layout(bf16=True, fp32_sums=True)
FAULTS = {
    "not-divided": Fault(not_divided, Layout(), "scale"),
    "divided-at-each-stage": Fault(divided_at_each_stage, Layout(), "scale", (f"{FIRST}, action 0B0",)),
    "tied-not-synced": Fault(
        left_out(trainers, "sync_tied_weights_gradients"), Layout(tied=True), "tied-not-summed", TIED
    ),
    "tied-averaged": Fault(tied_averaged, Layout(tied=True), "scale", TIED),
    "replicas-not-synced": Fault(
        left_out(trainers, "sync_gradients_across_dp"), Layout(dp=2, ddp=False), "not-reduced", EACH_STAGE
    ),
    "replicas-summed": Fault(replicas_summed, Layout(dp=2, ddp=False), "scale"),
    "synced-too-early": Fault(synced_too_early, Layout(dp=2), "not-reduced", EACH_STAGE),
    "other-stream": Fault(other_stream, Layout(), "swapped-data", (f"{LAST}, {ALL}, action 1F0",)),
    "stale-buffer": Fault(stale_buffer, Layout(), "mispaired", (f"{LAST}, microbatch 2, action 1F2",)),
    "last-in-first-out": Fault(last_in_first_out, Layout(), "mispaired", (f"{FIRST}, {ALL}, action 0B1",)),
    "other-block": Fault(other_block, Layout(), "computation", (f"{FIRST}, {ALL}, action 0F0",)),
    "norm-of-one-stage": Fault(norm_of_one_stage, Layout(), "norm", ("everywhere",)),
    "norm-counts-copies": Fault(norm_counts_copies, Layout(tied=True), "norm"),
    "clipped-too-early": Fault(clipped_too_early, Layout(tied=True), "tied-not-summed", TIED),
    "not-cleared": Fault(not_cleared, Layout(), "extra-term"),
    "half-kept": Fault(half_kept, SUMS, "doubled", ("microbatches 0, 1, 2",)),
    "last-not-added": Fault(last_not_added, replace(SUMS, dp=2), "dropped", ("microbatches 6, 7",)),
}


def step(fault: str, layout: Layout, model: Any, microbatches: list[Any]) -> StepResult:
    """The step of ``tiny_llama``, wrong."""
    return planted(FAULTS[fault].plant, tiny_llama.step, layout, model, microbatches)
