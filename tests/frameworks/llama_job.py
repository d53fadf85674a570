"""A job that trains the tiny Llama on ranks of its own: a step of it is checked, then it goes on."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pipeproof
from pipeproof.core.verdict import Verdict
from pipeproof.foreign.frameworks.framework import launched
from pipeproof.foreign.frameworks.nanotron import _state_kept, cut
from pipeproof.worlds.worker import RankContext
from tests.frameworks import tiny_llama
from tests.frameworks.left import differences, left, seed
from tests.frameworks.nanotron_faults import FAULTS
from tests.frameworks.tiny_llama import Layout, Trainer

MICROBATCHES = 4


@contextmanager
def job_of(layout: Layout, fault: str = "") -> Iterator[tuple[Trainer, list[Any]]]:
    """A trainer, and the microbatches of this rank's replica, with pointers to what other ranks have."""
    with launched(), _state_kept(), ExitStack() as stack:
        if fault:
            FAULTS[fault].plant(stack)
        trainer = Trainer(layout, MICROBATCHES)
        replica = trainer.parallel_context.dp_pg.rank()
        data = tiny_llama.data_of(MICROBATCHES * layout.dp)[replica :: layout.dp]
        yield trainer, [cut(one, trainer) for one in data]


def check_of(trainer: Trainer, microbatches: list[Any] | None, layout: Layout) -> Any:
    reference = partial(tiny_llama.build, layout)
    return pipeproof.nanotron.check_step(trainer, microbatches, reference=reference, timeout_s=60.0)


def checked(_: RankContext, layout: Layout, fault: str) -> Verdict:
    """The verdict on a step that has a fault."""
    with job_of(layout, fault) as (trainer, microbatches):
        with check_of(trainer, microbatches, layout) as check:
            trainer.training_step(iter(microbatches))
        return check.verdict


def checked_and_unchecked(_: RankContext, layout: Layout) -> tuple[Verdict, list[str]]:
    """The verdict on a right step, and what is another after it and one more than in a job without a check."""
    found = []
    for check_it in (False, True):
        seed()
        with job_of(layout) as (trainer, microbatches):
            with check_of(trainer, microbatches, layout) if check_it else nullcontext() as check:
                trainer.training_step(iter(microbatches))
            first = left([trainer.unwrapped_model], trainer.optimizer, trainer)
            trainer.training_step(iter(microbatches))
            found.append([first, left([trainer.unwrapped_model], trainer.optimizer, trainer)])
    return check.verdict, differences(*found)


def tried_again(_: RankContext, layout: Layout) -> Verdict:
    """The verdict on a step after one in which the data ended early on every rank, which the job caught."""
    with job_of(layout) as (trainer, microbatches):
        with suppress(RuntimeError):
            trainer.training_step(iter(microbatches[:2]))
        trainer.optimizer.zero_grad()
        with check_of(trainer, microbatches, layout) as check:
            trainer.training_step(iter(microbatches))
        return check.verdict


def not_cleared(_: RankContext, layout: Layout) -> Verdict:
    """The verdict on a second step on the same data, before which gradients were not cleared."""
    with job_of(layout) as (trainer, microbatches):
        trainer.optimizer.step = trainer.optimizer.zero_grad = lambda: None
        trainer.training_step(iter(microbatches))
        del trainer.optimizer.step
        with check_of(trainer, microbatches, layout) as check:
            trainer.training_step(iter(microbatches))
        return check.verdict


def refused(context: RankContext, layout: Layout) -> tuple[str, bool]:
    """The verdict where one rank gives something else than a trainer, and whether the job trained."""
    with job_of(layout) as (trainer, microbatches):
        before = [one.detach().clone() for one in trainer.unwrapped_model.parameters()]
        given: Any = "no trainer" if context.rank else trainer
        with check_of(given, microbatches, layout) as check:
            trainer.training_step(iter(microbatches))
        after = trainer.unwrapped_model.parameters()
        return check.verdict.details, any(not one.equal(other) for one, other in zip(before, after, strict=True))


def recorded(_: RankContext, layout: Layout, path: str) -> None:
    """Record a step."""
    with job_of(layout) as (trainer, microbatches):
        with pipeproof.nanotron.record_step(trainer, microbatches, path, timeout_s=60.0):
            trainer.training_step(iter(microbatches))
