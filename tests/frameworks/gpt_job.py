"""A job that trains the tiny GPTModel on ranks of its own."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random

import pipeproof
from pipeproof.core.verdict import Verdict
from pipeproof.worlds.worker import RankContext
from tests.frameworks.engines import tiny_gpt
from tests.frameworks.engines.megatron_layout import MegatronLayout as Layout
from tests.frameworks.jobs import Job
from tests.frameworks.left import differences, left, seed
from tests.frameworks.megatron_faults import PLANTS

MICROBATCHES = 4


@contextmanager
def job_of(layout: Layout, fault: str = "") -> Iterator[Job]:
    """Chunks and the optimizer are what is made, of this rank."""
    with ExitStack() as stack:
        if fault:
            PLANTS[fault](stack)
        chunks = tiny_gpt.made(layout)
        stack.callback(parallel_state.destroy_model_parallel)
        optimizer = tiny_gpt.optimizer_of(layout, chunks)
        replica = parallel_state.get_data_parallel_rank()
        data = tiny_gpt.data_of(MICROBATCHES * layout.dp)[replica :: layout.dp]
        yield Job(
            (chunks, optimizer),
            data,
            [tuple(one.flip(-1) for one in given) for given in data],
            partial(_check, chunks, optimizer, data, layout),
            partial(train, chunks, optimizer, layout),
            lambda: left(chunks, optimizer),
        )


def _check(chunks: list[Any], optimizer: Any, microbatches: list[Any], layout: Layout, by_itself: bool) -> Any:
    return pipeproof.megatron.check_step(
        chunks,
        optimizer,
        tiny_gpt.forward_of(layout),
        microbatches,
        reference=pipeproof.StageByStage() if by_itself else partial(tiny_gpt.provided, layout.whole),
        timeout_s=60.0,
    )


def train(chunks: list[Any], optimizer: Any, layout: Layout, microbatches: list[Any]) -> None:
    data = [iter(microbatches) for _ in chunks]
    tiny_gpt.train_step(
        tiny_gpt.forward_of(layout), data if layout.vp > 1 else data[0], chunks, optimizer, len(microbatches)
    )


@contextmanager
def with_dropout() -> Iterator[None]:
    """While this is open, models are made with dropout, and Megatron's tracker keeps states of the CPU's numbers."""
    config_of = tiny_gpt.config_of

    def dropping(layout: Layout) -> Any:
        config = config_of(layout)
        config.attention_dropout = config.hidden_dropout = 0.1
        return config

    with ExitStack() as stack:
        for name, on_cpu in {"_get": torch.get_rng_state, "_set": torch.set_rng_state}.items():
            stub = partial(_without_options, on_cpu)
            stack.enter_context(mock.patch.object(megatron_random, f"{name}_cuda_rng_state", stub))
        stack.enter_context(mock.patch.object(tiny_gpt, "config_of", dropping))
        megatron_random.initialize_rng_tracker()
        yield


def _without_options(function: Any, *given: Any, **_: Any) -> Any:
    return function(*given)


def drew_by_the_tracker(_: RankContext, layout: Layout) -> tuple[Verdict, list[str]]:
    """The verdict on a step whose attention drops by Megatron's tracker, and what is another in the job after it."""
    found, tracked = [], []
    with with_dropout():
        for check_it in (False, True):
            seed()
            tracker = megatron_random.get_cuda_rng_tracker()
            tracker.set_states({"model-parallel-rng": torch.Generator().manual_seed(5).get_state()})
            with job_of(layout) as job:
                with job.check(True) if check_it else nullcontext() as checked:
                    job.train(job.data)
                job.train(job.data)
                found.append([job.state()])
            tracked.append(tracker.get_states()["model-parallel-rng"])
    dist.barrier()
    other = [] if torch.equal(*tracked) else ["the tracker's state"]
    return checked.verdict, [*differences(*found), *other]


def not_cleared(_: RankContext, layout: Layout) -> Verdict:
    """The verdict on a second step that adds to the gradients of the first."""
    with job_of(layout) as job:
        job.train(job.data)
        with mock.patch.object(type(job.made[0][0]), "zero_grad_buffer"):
            with job.check(False) as check:
                job.train(job.data[::-1])
        return check.verdict
