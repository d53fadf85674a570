"""A job that trains the tiny PipelineModule on ranks of its own."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import deepspeed

import pipeproof
from pipeproof import StageByStage
from pipeproof.wings.adapters.deepspeed import as_launched
from tests.frameworks.deepspeed_faults import FAULTS
from tests.frameworks.engines import tiny_pipe
from tests.frameworks.engines.deepspeed_layout import DeepSpeedLayout as Layout
from tests.frameworks.jobs import Job
from tests.frameworks.left import left

MICROBATCHES = 4


@contextmanager
def job_of(layout: Layout, fault: str = "") -> Iterator[Job]:
    """The engine is what is made."""
    with as_launched("cpu"), ExitStack() as stack:
        if fault:
            FAULTS[fault].plant(stack)
        deepspeed.init_distributed()
        engine = tiny_pipe.made(layout, MICROBATCHES)
        replica = engine.grid.get_data_parallel_id()
        data = tiny_pipe.data_of(MICROBATCHES * layout.dp)[replica :: layout.dp]
        yield Job(
            engine,
            data,
            [(words.flip(-1), labels) for words, labels in data],
            lambda by_itself: check_of(engine, data, layout, by_itself=by_itself),
            lambda given: tiny_pipe.train_step(engine, iter(given)),
            lambda: left([engine.module], engine.optimizer, engine),
            clean=lambda: "_take_model_step" not in vars(engine),
        )


def check_of(engine: Any, microbatches: list[Any] | None, layout: Layout, *, by_itself: bool = False) -> Any:
    return pipeproof.deepspeed.check_step(
        engine,
        microbatches,
        reference=StageByStage() if by_itself else partial(tiny_pipe.layers, layout),
        loss_fn=tiny_pipe.loss_fn,
        timeout_s=60.0,
    )
