"""A job that trains the tiny Llama on ranks of its own."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.components.loss import IGNORE_INDEX

import pipeproof
from pipeproof import Contract, StageByStage
from pipeproof.records.record import Record
from tests.frameworks.engines import tiny_titan
from tests.frameworks.engines.tiny_titan import Data
from tests.frameworks.engines.torchtitan_layout import TorchtitanLayout as Layout
from tests.frameworks.jobs import Job
from tests.frameworks.left import left
from tests.frameworks.torchtitan_faults import PLANTS

MICROBATCHES = 4


@contextmanager
def job_of(layout: Layout, fault: str = "") -> Iterator[Job]:
    """What a trainer has, with an optimizer, is what is made."""
    layout = replace(layout, whole_batch=True)
    with ExitStack() as stack:
        if fault:
            PLANTS[fault](stack)
        trainer = tiny_titan.made(layout, tiny_titan.build(layout), MICROBATCHES)
        trainer.optimizer = torch.optim.AdamW([one for part in trainer.model_parts for one in part.parameters()])
        replica = 0 if layout.dp == 1 else trainer.parallel_dims.get_mesh("batch").get_local_rank()
        data = tiny_titan.data_of(MICROBATCHES * layout.dp)[replica :: layout.dp]
        own = trainer.pp_schedule, trainer.model_parts
        yield Job(
            trainer,
            data,
            [({**given, "input": given["input"].flip(-1)}, labels) for given, labels in data],
            partial(_check, trainer, data, layout),
            partial(_train, trainer, layout),
            lambda: left(trainer.model_parts, trainer.optimizer, trainer.pp_schedule),
            lambda path: pipeproof.torchtitan.record_step(*own, data, path, timeout_s=60.0),
            lambda: "step" not in vars(trainer.pp_schedule),
        )


def _check(trainer: SimpleNamespace, microbatches: Data, layout: Layout, by_itself: bool) -> Any:
    by = StageByStage(optimizer=trainer.optimizer, contract=Contract(max_norm=0.1 if layout.clipped else math.inf))
    return pipeproof.torchtitan.check_step(
        trainer.pp_schedule,
        trainer.model_parts,
        microbatches,
        reference=by if by_itself else partial(tiny_titan.build, layout),
        loss_fn=tiny_titan.loss_fn,
        timeout_s=60.0,
    )


def _train(trainer: SimpleNamespace, layout: Layout, microbatches: Data) -> None:
    trainer.optimizer.zero_grad()
    tiny_titan.train_step(layout, trainer, microbatches)
    trainer.optimizer.step()


class Whole(torch.nn.Module):
    """The model on one device, called as record_step calls it."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._modules = (model := tiny_titan.build(layout))._modules
        self._model = [model]

    def forward(self, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._model[0](words, positions=positions)
        return made


def expected(layout: Layout, *, stepping: bool = False) -> Record:
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
