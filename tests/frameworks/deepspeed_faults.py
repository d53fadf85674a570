"""Faults at DeepSpeed's real places: a batch of the tiny PipelineModule with one of them."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from pipeproof import StepResult
from tests.frameworks.engines import tiny_pipe
from tests.frameworks.engines.deepspeed_layout import DeepSpeedLayout as Layout
from tests.frameworks.fault import Fault, in_place_of, left_out, patched, planted

Instruction = Callable[..., None]


def executed(stack: ExitStack, instruction: type, wrong: Callable[..., None]) -> None:
    """Have the engine execute ``instruction`` by ``wrong``, which is given the right way and the engine first."""
    right = PipelineEngine._INSTRUCTION_MAP[instruction]

    def made(engine: PipelineEngine, **named: Any) -> None:
        wrong(right, engine, **named)

    stack.enter_context(mock.patch.dict(PipelineEngine._INSTRUCTION_MAP, {instruction: made}))


def not_executed(instruction: type, stack: ExitStack) -> None:
    executed(stack, instruction, lambda right, engine, **named: None)


@in_place_of(DeepSpeedEngine, "backward")
def not_divided(right: Any, engine: PipelineEngine, loss: Tensor) -> None:
    right(engine, loss, scale_wrt_gas=False)


def divided_at_each_stage(stack: ExitStack) -> None:
    """Stages divide what flows back as if it were their own loss's."""
    right = DeepSpeedEngine._backward_prologue_per_tensor
    stack.enter_context(mock.patch.object(PipelineEngine, "_backward_prologue_per_tensor", right))


@in_place_of(tiny_pipe, "train_step")
def other_stream(right: Any, engine: PipelineEngine, data: Any) -> None:
    """The last stage reads one microbatch ahead."""
    every = list(data)
    right(engine, iter(every[1:] + every[:1] if engine.is_last_stage() else every))


def other_buffer(stack: ExitStack) -> None:
    """The first stage's last two backwards take each other's buffer."""
    observed: list[int] = []

    def backward(right: Instruction, engine: PipelineEngine, buffer_id: int) -> None:
        observed.append(buffer_id)
        last_two = engine.is_first_stage() and len(observed) > engine.micro_batches - 2
        right(engine, 1 - buffer_id if last_two else buffer_id)

    executed(stack, schedule.BackwardPass, backward)


def stale_buffer(stack: ExitStack) -> None:
    """What comes for microbatch 2 is what came for 1: the buffer is used before the message is there."""
    came: list[int] = []

    def received(right: Any, tensor: Tensor, stage: int) -> Any:
        if not tensor.is_floating_point() or tensor.dim() < 3:
            return right(tensor, stage)
        came.append(stage)
        forwards = stage == 0
        return right(tensor.clone() if forwards and len(came) == 3 else tensor, stage)

    patched(stack, p2p, "recv", received)


def stale_gradient(stack: ExitStack) -> None:
    """The first stage runs a backward with the gradient that came for the one before."""
    observed: list[int] = []

    def received(right: Instruction, engine: PipelineEngine, buffer_id: int) -> None:
        before = None if engine.grad_layer is None else engine.grad_layer.clone()
        right(engine, buffer_id)
        observed.append(buffer_id)
        if len(observed) == 2:
            engine.grad_layer.copy_(before)

    executed(stack, schedule.RecvGrad, received)


@in_place_of(PipelineModule, "_index_tied_modules")
def copies_counted(right: Any, module: PipelineModule) -> Any:
    """Every copy of a tied parameter is one of its own to the norm."""
    made = right(module)
    for parameter in module.parameters():
        parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]  # DeepSpeed's
    return made


@in_place_of(DeepSpeedEngine, "allreduce_bucket")
def summed_over_replicas(right: Any, engine: PipelineEngine, *given: Any) -> Any:
    """Gradients of replicas are not divided by their number."""
    engine.gradient_average = False
    return right(engine, *given)


def other_shard(stack: ExitStack) -> None:
    """Every rank has the shard reduced that is the next rank's."""

    def other(ranks: frozenset[int]) -> frozenset[int]:
        return frozenset(1 - rank for rank in ranks)

    def scattered(right: Any, optimizer: Any, bucket: list[Any], *given: Any, **named: Any) -> Any:
        return right(optimizer, [(other(ranks), *rest) for ranks, *rest in bucket], *given, **named)

    patched(stack, DeepSpeedZeroOptimizer, "allreduce_and_scatter", scattered)


def as_it_is(stack: ExitStack) -> None:
    """Nothing is planted: in fp32 without ZeRO, DeepSpeed 0.19.8 itself clips by the norm of the first stage alone."""


FIRST = "rank 0, stage 0"
EACH_STAGE = ("stage 0", "stage 1")
SHARDS = ("stage 0, parameter 1.down.weight", "stage 1, parameter 4.up.weight")
TIED = ("parameter tied_modules.words.weight",)
FAULTS = {
    "not-divided": Fault(not_divided, Layout(), "scale"),
    "divided-at-each-stage": Fault(divided_at_each_stage, Layout(), "scale", (FIRST,)),
    "tied-not-reduced": Fault(
        partial(not_executed, schedule.ReduceTiedGrads), Layout(tied=True), "tied-not-summed", TIED
    ),
    "not-reduced": Fault(partial(not_executed, schedule.ReduceGrads), Layout(dp=2), "not-reduced", EACH_STAGE),
    "other-stream": Fault(other_stream, Layout(), "swapped-data", ("microbatches 0, 1, 2, 3",)),
    "other-buffer": Fault(other_buffer, Layout(), "mispaired", (f"{FIRST}, microbatches 2, 3, action 0B3",)),
    "stale-buffer": Fault(stale_buffer, Layout(), "mispaired", ("rank 1, stage 1, microbatch 2, action 1F2",)),
    "stale-gradient": Fault(stale_gradient, Layout(), "mispaired", (f"{FIRST}, microbatch 1, action 0B1",)),
    "copies-counted": Fault(copies_counted, Layout(tied=True, zero=1), "norm"),
    "norm-of-one-stage": Fault(
        left_out(DeepSpeedZeroOptimizer, "_model_parallel_all_reduce"), Layout(zero=1), "norm", ("everywhere",)
    ),
    "summed-over-replicas": Fault(summed_over_replicas, Layout(dp=2), "scale"),
    "other-shard": Fault(other_shard, Layout(dp=2, zero=1), "not-reduced", SHARDS),
    "not-cleared": Fault(  # gradients, which were added to the step's, are added with the next microbatch's again
        left_out(BF16_Optimizer, "clear_lp_grads"), Layout(bf16=True), "doubled", ("microbatches 0, 1, 2",)
    ),
    "clipped-by-one-stage": Fault(as_it_is, Layout(clipped=True), "norm", ("rank 0",)),
}


def step(fault: str, layout: Layout, model: nn.Module, microbatches: list[Any]) -> StepResult:
    """The step of ``tiny_pipe``, wrong."""
    return planted(FAULTS[fault].plant, tiny_pipe.step, layout, model, microbatches)
