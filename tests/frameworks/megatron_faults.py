"""Faults at Megatron-core's real places, each from its public history: a step of the tiny GPTModel with one of them."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.foreign import HandedBack
from tests.frameworks import tiny_gpt
from tests.frameworks.tiny_gpt import Layout
from megatron.core import parallel_state
from megatron.core.distributed import distributed_data_parallel, param_and_grad_buffer
from megatron.core.distributed import finalize_model_grads as finalize
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

Patch = Callable[[ExitStack], None]


def _divided_by(how: Callable[[int], int], stack: ExitStack) -> None:
    inner = schedules.forward_step_calc_loss

    def calc_loss(*given: Any, **named: Any) -> Any:
        return inner(*given[:6], how(given[6]), *given[7:], **named)

    stack.enter_context(mock.patch.object(schedules, "forward_step_calc_loss", calc_loss))


def tied_not_reduced(stack: ExitStack) -> None:
    import sys

    module = sys.modules["megatron.core.distributed.finalize_model_grads"]
    stack.enter_context(mock.patch.object(module, "_allreduce_word_embedding_grads", lambda *_, **__: None))


def not_finalized(stack: ExitStack) -> None:
    inner = tiny_gpt.train_step

    def train_step(forward: Any, data: Any, chunks: list[Any], *more: Any) -> None:
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = None
        inner(forward, data, chunks, *more)

    stack.enter_context(mock.patch.object(tiny_gpt, "train_step", train_step))


def other_stream(stack: ExitStack) -> None:
    """The last stage reads its labels one microbatch ahead (J1)."""
    inner = tiny_gpt.train_step

    def train_step(forward: Any, data: Any, *more: Any) -> None:
        every = list(data)
        ahead = every[1:] + every[:1] if parallel_state.is_pipeline_last_stage() else every
        inner(forward, iter(ahead), *more)

    stack.enter_context(mock.patch.object(tiny_gpt, "train_step", train_step))


def stale_buffer(stack: ExitStack) -> None:
    """What is received for microbatch 2 is still what came for 1: the buffer is read before its message is there."""
    for name in ("recv_forward", "send_backward_recv_forward"):
        stack.enter_context(mock.patch.object(P2PCommunicator, name, _stale(getattr(P2PCommunicator, name))))


_received: list[Tensor] = []


def _stale(receive: Callable[..., Any]) -> Callable[..., Any]:
    def received(*given: Any, **named: Any) -> Any:
        made = receive(*given, **named)
        tensor = made[0] if isinstance(made, list) else made
        if tensor is not None:
            _received.append(tensor)
            if len(_received) == 3:
                tensor.data.copy_(_received[1].data)
        return made

    return received


def last_in_first_out(stack: ExitStack) -> None:
    name = "forward_backward_pipelining_without_interleaving"
    text = inspect.getsource(getattr(schedules, name)).replace(".pop(0)", ".pop()")
    space = dict(vars(schedules))
    exec(text, space)
    stack.enter_context(mock.patch.object(schedules, name, space[name]))


def other_chunk(stack: ExitStack) -> None:
    """Rank 1 runs its second chunk in place of its first, as where code goes by the rank alone (J2)."""
    inner = tiny_gpt.forward_step
    chunks: list[Any] = []

    def forward_step(data: Any, model: Any) -> Any:
        if not any(model is one for one in chunks):
            chunks.append(model)
        return inner(data, model)

    make = tiny_gpt.made

    def made(layout: Layout) -> list[Any]:
        made_chunks = make(layout)
        if dist.get_rank() == 1:
            first, second = made_chunks[0], made_chunks[1]
            call = first.forward
            first.forward = lambda *given, **named: (
                second.module.set_input_tensor(first.module.decoder.input_tensor),
                second.forward(*given, **named),
            )[1]
            del call
        return made_chunks

    stack.enter_context(mock.patch.object(tiny_gpt, "made", made))


def norm_counts_copies(stack: ExitStack) -> None:
    """The copy of a tied embedding counts in the norm, too (D2)."""
    stack.enter_context(mock.patch.object(optimizers, "param_is_not_shared", lambda _: True))


def norm_of_one_stage(stack: ExitStack) -> None:
    """The norm is not summed over the stages."""
    inner = clip_grads.get_grad_norm_fp32

    def own(grads: Any, norm_type: Any = 2, grad_stats_parallel_group: Any = None) -> Any:
        del grad_stats_parallel_group
        group = parallel_state.get_tensor_model_parallel_group()
        return inner(grads, norm_type, group)

    stack.enter_context(mock.patch.object(optimizers, "get_grad_norm_fp32", own))


def not_cleared(stack: ExitStack) -> None:
    """A step before left its gradients in the buffer (E7)."""
    inner = tiny_gpt.train_step

    def train_step(forward: Any, data: Any, chunks: list[Any], *more: Any) -> None:
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.main_grad.copy_(parameter.data)
        clear = mock.patch.object(type(chunks[0]), "zero_grad_buffer", lambda *_: None)
        with clear:
            inner(forward, data, chunks, *more)

    stack.enter_context(mock.patch.object(tiny_gpt, "train_step", train_step))


def summed_over_replicas(stack: ExitStack) -> None:
    """Gradients of replicas are summed: the factor 1 / DP is lost."""
    inner = param_and_grad_buffer._ParamAndGradBucket.__init__

    def made(bucket: Any, *given: Any, **named: Any) -> None:
        inner(bucket, *given, **named)
        bucket.gradient_scaling_factor = 1.0

    stack.enter_context(mock.patch.object(param_and_grad_buffer._ParamAndGradBucket, "__init__", made))


def other_shard(stack: ExitStack) -> None:
    """Every rank reduces the shard of the next."""
    inner = param_and_grad_buffer.shard_buffer

    def shards(*given: Any) -> Any:
        made = inner(*given)
        return made[1:] + made[:1]

    stack.enter_context(mock.patch.object(param_and_grad_buffer, "shard_buffer", shards))


def tokens_of_one_replica(stack: ExitStack) -> None:
    """Gradients are divided by the tokens of one replica, not of all (A6)."""
    inner = dist.all_reduce

    def all_reduce(tensor: Tensor, *given: Any, **named: Any) -> Any:
        return None if tensor.dtype == torch.int else inner(tensor, *given, **named)

    stack.enter_context(mock.patch.object(dist, "all_reduce", all_reduce))


def nothing(stack: ExitStack) -> None:
    """Megatron as it is."""


@dataclass(frozen=True)
class Fault:
    """A fault, the layout that shows it, and what the verdict is to say: any of these causes, at any of these stages."""

    plant: Patch
    layout: Layout
    causes: tuple[str, ...]
    stages: tuple[int | None, ...] = ()
    microbatches: int = 4


def step(fault: str, layout: Layout, model: Any, microbatches: list[Any]) -> HandedBack:
    _received.clear()
    with ExitStack() as stack:
        FAULTS[fault].plant(stack)
        return tiny_gpt.step(layout, model, microbatches)


FAULTS = {
    "not divided": Fault(partial(_divided_by, lambda m: 1), Layout(), ("scaled",)),
    "divided twice": Fault(partial(_divided_by, lambda m: m * m), Layout(), ("scaled",)),
    "tied not reduced": Fault(tied_not_reduced, Layout(tied=True), ("tied",)),
    "not finalized": Fault(not_finalized, Layout(dp=2), ("not-reduced",)),
    "other stream": Fault(other_stream, Layout(), ("",)),
    "stale buffer": Fault(stale_buffer, Layout(), ("",)),
    "last in, first out": Fault(last_in_first_out, Layout(), ("mispaired",)),
    "other chunk": Fault(other_chunk, Layout(vp=3, layers=6, p2p_overlap=True), ("",)),
    "norm counts copies": Fault(norm_counts_copies, Layout(tied=True, optimizer=True), ("",)),
    "norm of one stage": Fault(norm_of_one_stage, Layout(optimizer=True), ("",)),
    "not cleared": Fault(not_cleared, Layout(), ("",)),
    "summed over replicas": Fault(summed_over_replicas, Layout(dp=2), ("",)),
    "other shard": Fault(other_shard, Layout(dp=2, distributed=True), ("",)),
    "tokens of one replica": Fault(tokens_of_one_replica, Layout(dp=2, three=True, per_token=True), ("",)),
    "crossed messages": Fault(nothing, Layout(vp=2), ("wrong-message",)),
}
