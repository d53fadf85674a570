"""A job that trains the tiny Llama on ranks of its own: a step of it is checked, then it goes on."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.components.loss import IGNORE_INDEX

import pipeproof
from pipeproof import Composed, Contract
from pipeproof.core.verdict import Verdict
from pipeproof.records.record import Record
from pipeproof.worlds.worker import RankContext
from tests.frameworks.engines import tiny_titan
from tests.frameworks.engines.tiny_titan import Data
from tests.frameworks.engines.torchtitan_layout import TorchtitanLayout as Layout
from tests.frameworks.left import differences, left, seed
from tests.frameworks.torchtitan_faults import PLANTS

MICROBATCHES = 4


@contextmanager
def trainer_of(layout: Layout, fault: str = "") -> Iterator[tuple[SimpleNamespace, Data]]:
    """What a trainer has, with an optimizer, and the microbatches of this rank's replica."""
    layout = replace(layout, whole_batch=True)
    with ExitStack() as stack:
        if fault:
            PLANTS[fault](stack)
        trainer = tiny_titan.made(layout, tiny_titan.build(layout), MICROBATCHES)
        trainer.optimizer = torch.optim.AdamW([one for part in trainer.model_parts for one in part.parameters()])
        replicas = layout.dp
        replica = 0 if replicas == 1 else trainer.parallel_dims.get_mesh("batch").get_local_rank()
        yield trainer, tiny_titan.data_of(MICROBATCHES * replicas)[replica::replicas]


def check_of(trainer: SimpleNamespace, microbatches: Data, layout: Layout, *, composed: bool = False) -> Any:
    by = Composed(optimizer=trainer.optimizer, contract=Contract(max_norm=0.1 if layout.clipped else math.inf))
    return pipeproof.torchtitan.check_step(
        trainer.pp_schedule,
        trainer.model_parts,
        microbatches,
        reference=by if composed else partial(tiny_titan.build, layout),
        loss_fn=tiny_titan.loss_fn,
        timeout_s=60.0,
    )


def train(trainer: SimpleNamespace, microbatches: Data, layout: Layout) -> None:
    trainer.optimizer.zero_grad()
    tiny_titan.train_step(layout, trainer, microbatches)
    trainer.optimizer.step()


def checked(_: RankContext, layout: Layout, fault: str, composed: bool = False) -> Verdict:
    """The verdict on a step that has a fault; ``composed``: it is held against itself."""
    with trainer_of(layout, fault) as (trainer, microbatches):
        with check_of(trainer, microbatches, layout, composed=composed) as check:
            train(trainer, microbatches, layout)
        return check.verdict


class Whole(torch.nn.Module):
    """The model on one device, called as record_step calls it."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._modules = (model := tiny_titan.build(layout))._modules
        self._model = [model]

    def forward(self, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._model[0](words, positions=positions)
        return made


def due(layout: Layout, *, stepping: bool = False) -> Record:
    """The record of the same step on one device; with the optimizer's, if it is ``stepping``."""
    model, every = Whole(layout), tiny_titan.data_of(MICROBATCHES * layout.dp)
    tokens = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in every]).sum()

    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = tiny_titan.loss_fn(logits, labels, tokens)[0]
        return loss

    return pipeproof.record_step(
        model,
        [((given["input"], given["positions"]), labels) for given, labels in every],
        loss_fn=loss_fn,
        contract=Contract(loss_divisor=1, max_norm=0.1 if layout.clipped else None),
        optimizer=torch.optim.AdamW(model.parameters()) if stepping else None,
    )


def recorded(_: RankContext, layout: Layout, path: str, fault: str) -> str:
    """Record a step that has a fault, or none; why that cannot be."""
    with trainer_of(layout, fault) as (trainer, microbatches):
        schedule, parts = trainer.pp_schedule, trainer.model_parts
        with pipeproof.torchtitan.record_step(schedule, parts, microbatches, path, timeout_s=60.0) as seen:
            train(trainer, microbatches, layout)
        return seen.problem


def checked_and_unchecked(_: RankContext, layout: Layout, composed: bool = False) -> tuple[Verdict, list[str]]:
    """The verdict on a right step, and what is another after it and one more than in a job without a check."""
    found = []
    for check_it in (False, True):
        seed()
        with trainer_of(layout) as (trainer, microbatches):
            by = check_of(trainer, microbatches, layout, composed=composed)
            with by if check_it else nullcontext() as check:
                train(trainer, microbatches, layout)
            first = left(trainer.model_parts, trainer.optimizer, trainer.pp_schedule)
            train(trainer, microbatches, layout)
            found.append([first, left(trainer.model_parts, trainer.optimizer, trainer.pp_schedule)])
    return check.verdict, differences(*found)


def ended_early(_: RankContext, layout: Layout) -> tuple[str, str, bool]:
    """What a step that raises on every rank raises, the verdict on it, and whether the schedule is as it was."""
    with trainer_of(layout) as (trainer, microbatches):
        check = check_of(trainer, microbatches, layout)
        try:
            with check as found:
                raise KeyError("the job's own")
        except KeyError as error:
            return repr(error), found.verdict.details, "step" not in vars(trainer.pp_schedule)
    raise AssertionError("what the job raises is the job's")


def drew_in_another_order(_: RankContext, layout: Layout) -> Verdict:
    """The verdict on a right step of what the check was given, the last first."""
    with trainer_of(layout) as (trainer, microbatches):
        with check_of(trainer, microbatches, layout) as check:
            train(trainer, microbatches[::-1], layout)
        return check.verdict


def drew_others(_: RankContext, layout: Layout) -> Verdict:
    """The verdict on a right step of other words than the check was given."""
    with trainer_of(layout) as (trainer, microbatches):
        others = [({**given, "input": given["input"].flip(-1)}, labels) for given, labels in microbatches]
        with check_of(trainer, microbatches, layout) as check:
            train(trainer, others, layout)
        return check.verdict


def trained_twice(_: RankContext, layout: Layout) -> Verdict:
    """The verdict on a block with two steps in it."""
    with trainer_of(layout) as (trainer, microbatches):
        with check_of(trainer, microbatches, layout) as check:
            train(trainer, microbatches, layout)
            train(trainer, microbatches, layout)
        return check.verdict
