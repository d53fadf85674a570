"""A job that trains the tiny Llama on ranks of its own."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import pipeproof
from pipeproof.core.verdict import Verdict
from pipeproof.wings.adapters.nanotron import Nanotron
from pipeproof.wings.adapters.nanotron_place import as_launched
from pipeproof.worlds.worker import RankContext
from tests.frameworks import tiny_llama
from tests.frameworks.jobs import Job
from tests.frameworks.left import left
from tests.frameworks.nanotron_faults import FAULTS
from tests.frameworks.tiny_llama import Layout, Trainer

MICROBATCHES = 4


@contextmanager
def job_of(layout: Layout, fault: str = "") -> Iterator[Job]:
    """A trainer is what is made; of the data, this rank has pointers to what other ranks have."""
    with as_launched(), ExitStack() as stack:
        if fault:
            FAULTS[fault].plant(stack)
        trainer = Trainer(layout, MICROBATCHES)
        replica = trainer.parallel_context.dp_pg.rank()
        drawn = tiny_llama.data_of(MICROBATCHES * layout.dp)[replica :: layout.dp]
        data = [Nanotron(trainer).share_of(one) for one in drawn]
        yield Job(
            trainer,
            data,
            None,
            lambda _: check_of(trainer, data, layout),
            lambda given: trainer.training_step(iter(given)),
            lambda: left([trainer.unwrapped_model], trainer.optimizer, trainer),
            lambda path: pipeproof.nanotron.record_step(trainer, data, path, timeout_s=60.0),
        )


def check_of(trainer: Trainer, microbatches: list[Any] | None, layout: Layout) -> Any:
    reference = partial(tiny_llama.build, layout)
    return pipeproof.nanotron.check_step(trainer, microbatches, reference=reference, timeout_s=60.0)


def tried_again(_: RankContext, layout: Layout) -> Verdict:
    """The verdict on a step after one in which the data ended early on every rank, which the job caught."""
    with job_of(layout) as job:
        trainer, microbatches = job.made, job.data
        with suppress(RuntimeError):
            trainer.training_step(iter(microbatches[:2]))
        trainer.optimizer.zero_grad()
        with check_of(trainer, microbatches, layout) as check:
            trainer.training_step(iter(microbatches))
        return check.verdict


def not_cleared(_: RankContext, layout: Layout) -> Verdict:
    """The verdict on a second step on the same data, before which gradients were not cleared."""
    with job_of(layout) as job:
        trainer, microbatches = job.made, job.data
        trainer.optimizer.step = trainer.optimizer.zero_grad = lambda: None
        trainer.training_step(iter(microbatches))
        del trainer.optimizer.step
        with check_of(trainer, microbatches, layout) as check:
            trainer.training_step(iter(microbatches))
        return check.verdict


def refused(context: RankContext, layout: Layout) -> tuple[str, bool]:
    """The verdict where one rank gives something else than a trainer, and whether the job trained."""
    with job_of(layout) as job:
        trainer, microbatches = job.made, job.data
        before = [one.detach().clone() for one in trainer.unwrapped_model.parameters()]
        given: Any = "no trainer" if context.rank else trainer
        with check_of(given, microbatches, layout) as check:
            trainer.training_step(iter(microbatches))
        after = trainer.unwrapped_model.parameters()
        return check.verdict.details, any(not one.equal(other) for one, other in zip(before, after, strict=True))
