"""A job that trains the tiny PipelineModule on ranks of its own: a step of it is checked, then it goes on."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import deepspeed

import pipeproof
from pipeproof import Composed
from pipeproof.core.verdict import Verdict
from pipeproof.foreign.frameworks.deepspeed import _launched, _state_kept
from pipeproof.worlds.worker import RankContext
from tests.frameworks.deepspeed_faults import FAULTS
from tests.frameworks.engines import tiny_pipe
from tests.frameworks.engines.deepspeed_layout import DeepSpeedLayout as Layout
from tests.frameworks.left import differences, left, seed

MICROBATCHES = 4


@contextmanager
def engine_of(layout: Layout, fault: str = "") -> Iterator[tuple[Any, list[Any]]]:
    """An engine, and the microbatches of this rank's replica."""
    with _launched("cpu"), _state_kept(), ExitStack() as stack:
        if fault:
            FAULTS[fault].plant(stack)
        deepspeed.init_distributed()
        engine = tiny_pipe.made(layout, MICROBATCHES)
        replica = engine.grid.get_data_parallel_id()
        yield engine, tiny_pipe.data_of(MICROBATCHES * layout.dp)[replica :: layout.dp]


def check_of(engine: Any, microbatches: list[Any] | None, layout: Layout, *, composed: bool = False) -> Any:
    return pipeproof.deepspeed.check_step(
        engine,
        microbatches,
        reference=Composed() if composed else partial(tiny_pipe.layers, layout),
        loss_fn=tiny_pipe.loss_fn,
        timeout_s=60.0,
    )


def checked(_: RankContext, layout: Layout, fault: str, composed: bool = False) -> Verdict:
    """The verdict on a step that has a fault; ``composed``: it is held against itself."""
    with engine_of(layout, fault) as (engine, microbatches):
        with check_of(engine, microbatches, layout, composed=composed) as check:
            tiny_pipe.train_step(engine, iter(microbatches))
        return check.verdict


def checked_and_unchecked(_: RankContext, layout: Layout, composed: bool = False) -> tuple[Verdict, list[str]]:
    """The verdict on a right step, and what is another after it and one more than in a job without a check."""
    found = []
    for check_it in (False, True):
        seed()
        with engine_of(layout) as (engine, microbatches):
            by = check_of(engine, microbatches, layout, composed=composed)
            with by if check_it else nullcontext() as check:
                tiny_pipe.train_step(engine, iter(microbatches))
            first = left([engine.module], engine.optimizer, engine)
            tiny_pipe.train_step(engine, iter(microbatches))
            found.append([first, left([engine.module], engine.optimizer, engine)])
    return check.verdict, differences(*found)


def ended_early(_: RankContext, layout: Layout) -> tuple[str, str, bool]:
    """What a step that raises on every rank raises, the verdict on it, and whether the engine is as it was."""
    with engine_of(layout) as (engine, microbatches):
        check = check_of(engine, microbatches, layout)
        try:
            with check as found:
                raise KeyError("the job's own")
        except KeyError as error:
            return repr(error), found.verdict.details, "_take_model_step" not in vars(engine)
    raise AssertionError("what the job raises is the job's")


def drew_others(_: RankContext, layout: Layout) -> Verdict:
    """The verdict on a right step of other words than the check was given."""
    with engine_of(layout) as (engine, microbatches):
        with check_of(engine, microbatches, layout) as check:
            tiny_pipe.train_step(engine, iter([(words.flip(-1), labels) for words, labels in microbatches]))
        return check.verdict
