"""A job of transformers' Trainer on ranks of its own, in DDP where there are several: one step of it is checked."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import pipeproof
from pipeproof import Contract, transformers
from pipeproof.worlds.worker import RankContext
from tests.frameworks import jobs, tiny_hf
from tests.frameworks.fault import Plant, in_place_of, left_out
from tests.frameworks.left import left
from tests.frameworks.tiny_hf import IGNORED, ROWS, SEQUENCE, WORDS


@dataclass(frozen=True)
class Job:
    """How a job is laid out, and what it is told."""

    model: str = "llama"
    ranks: int = 1
    accumulation: int = 2
    tied: bool = False
    dtype: str = "float32"
    loss: str = "tokens"
    max_norm: float = 1.0
    checked: int = 1  # the number of the step
    steps: int = 0  # how many are trained; 0: two more than the number
    optimizer: str = "adamw_torch"
    pp: ClassVar[int] = 1

    @property
    def dp(self) -> int:
        return self.ranks


def rows(count: int = 64) -> list[dict[str, Tensor]]:
    """Of which other numbers of labels count."""
    draw = torch.Generator().manual_seed(1)
    found = [torch.randint(3, WORDS, (SEQUENCE,), generator=draw) for _ in range(count)]
    labels = [torch.where(torch.arange(SEQUENCE) < number % 3, IGNORED, one) for number, one in enumerate(found)]
    return [{"input_ids": one, "labels": counts} for one, counts in zip(found, labels, strict=True)]


@contextmanager
def launched(job: Job) -> Iterator[str]:
    """While this is open, accelerate finds what a launcher would have set; a folder for what it writes."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    wanted = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.ranks, "LOCAL_WORLD_SIZE": job.ranks}
    several = {name: str(value) for name, value in wanted.items()} if job.ranks > 1 else {}
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, several):
        try:
            yield folder
        finally:
            for state in (AcceleratorState, PartialState, GradientState):
                state._shared_state.clear()


def trainer_of(job: Job, folder: str, kind: type[Trainer] = Trainer, **more: Any) -> Trainer:
    layout = tiny_hf.Layout(model=job.model, layers=2, tied=job.tied, dtype=job.dtype)
    arguments = TrainingArguments(
        output_dir=str(Path(folder)),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=job.accumulation,
        max_steps=job.steps or job.checked + 2,
        max_grad_norm=job.max_norm,
        learning_rate=0.01,
        optim=job.optimizer,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        **more,
    )
    return kind(model=tiny_hf.build(layout), args=arguments, train_dataset=rows())


class OwnLoss(Trainer):
    """A trainer of the user's, whose loss is not told of the tokens in the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(**inputs)
        return (output.loss, output) if return_outputs else output.loss


class ClippedEarly(Trainer):
    """A trainer of the user's, which clips after every microbatch."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.accelerator.clip_grad_norm_(model.parameters(), 0.1)
        return loss


class OneLost(Trainer):
    """A trainer of the user's, which leaves out the second microbatch of every step."""

    microbatch = 0

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self.microbatch += 1
        if self.microbatch % self.args.gradient_accumulation_steps == 1:
            return super().training_step(model, inputs, num_items_in_batch)
        return torch.zeros(())


@in_place_of(nn.parallel.DistributedDataParallel, "forward")
def never_synchronised(right: Any, own: Any, *inputs: Any, **named: Any) -> Any:
    """Replicas keep their own gradients: every microbatch is differentiated in ``no_sync``."""
    with own.no_sync():
        return right(own, *inputs, **named)


@in_place_of(Trainer, "compute_loss")
def not_multiplied(right: Any, own: Trainer, *given: Any, **named: Any) -> Any:
    """The loss is divided by the tokens of all processes, and DDP takes the mean over them."""
    with mock.patch.object(own.args, "average_tokens_across_devices", False):
        return right(own, *given, **named)


def nothing(stack: ExitStack) -> None:
    """What is wrong is in the trainer."""


class Wrong(NamedTuple):
    """A fault in a job: it is planted, or of what the trainer is told."""

    layout: Job = Job()
    plant: Plant = nothing
    more: Mapping[str, Any] = MappingProxyType({})


FAULTS = {
    "own-loss": Wrong(more={"kind": OwnLoss}),
    "clipped-early": Wrong(more={"kind": ClippedEarly}),
    "one-lost": Wrong(more={"kind": OneLost}),
    "not-cleared": Wrong(plant=left_out(nn.Module, "zero_grad")),
    "gpt2-first-counted": Wrong(Job(model="gpt2")),
    "never-synchronised": Wrong(Job(ranks=2, checked=0), never_synchronised),
    "own-tokens": Wrong(Job(ranks=2), more={"average_tokens_across_devices": False}),
    "not-multiplied": Wrong(Job(ranks=2), not_multiplied),
}


@contextmanager
def job_of(job: Job, fault: str = "") -> Iterator[jobs.Job]:
    """A trainer is what is made, which has its data."""
    _, plant, more = FAULTS[fault] if fault else Wrong()
    with ExitStack() as stack:
        plant(stack)
        trainer = trainer_of(job, stack.enter_context(launched(job)), **more)
        yield jobs.Job(
            trainer,
            None,
            None,
            lambda _: transformers.check_step(trainer, step=job.checked, loss=job.loss, timeout_s=60.0),
            lambda _: trainer.train(),
            lambda: left([trainer.model], trainer.optimizer.optimizer, trainer.accelerator),
            lambda path: transformers.record_step(trainer, path, step=job.checked, timeout_s=60.0),
            lambda: "get_batch_samples" not in vars(trainer) and "backward" not in vars(trainer.accelerator),
        )


def expected(_: RankContext, job: Job, path: str) -> None:
    """Write the record of the first step on one device, of the batches that a trainer of one process draws."""
    with job_of(job) as own:
        batches = [*islice(own.made.get_train_dataloader(), job.accumulation)]
    model = tiny_hf.build(tiny_hf.Layout(model=job.model, layers=2, tied=job.tied, dtype=job.dtype))
    tokens = sum(int((one["labels"][:, 1:] != IGNORED).sum()) for one in batches)

    def loss_fn(output: Any, labels: Tensor) -> Tensor:
        named = {"labels": labels, "vocab_size": WORDS, "num_items_in_batch": tokens}
        loss: Tensor = model.loss_function(logits=output.logits, **named)
        return loss

    pairs = [(one["input_ids"], one["labels"]) for one in batches]
    record = pipeproof.record_step(
        model,
        pairs,
        loss_fn=loss_fn,
        contract=Contract(loss_divisor=1.0, max_norm=job.max_norm or None),
    )
    pipeproof.write_record(record, path)


def ended_early(_: RankContext, job: Job) -> tuple[str, str, bool]:
    """What a job that raises in its step raises, the verdict on it, and whether the trainer is as it was."""
    with job_of(job) as own, mock.patch.object(own.made, "compute_loss", side_effect=KeyError("the job's own")):
        assert own.clean is not None
        try:
            with own.check(False) as check:
                own.train(None)
        except KeyError as error:
            return repr(error), check.verdict.details, own.clean()
    raise AssertionError("what the job raises is the job's")
