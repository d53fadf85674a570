"""Nanotron: a step that pipeproof starts, or one of a running job.

A user's step builds its trainer as usual and calls ``training_step`` inside ``observe``. The function that builds the
model also builds the reference. nanotron is imported only when one of these functions is called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeproof.core.verdict import Verdict
from pipeproof.records.checked_step import CheckedStep
from pipeproof.whitebox.validator import WhiteBox
from pipeproof.wings.adapters import adapter
from pipeproof.wings.adapters.framework import AdapterError, around
from pipeproof.wings.adapters.nanotron_place import (
    NANOTRON,
    NanotronStage,
    as_launched,
    bare,
    clipping_noted,
    context_of_one,
    core,
    pretend_alone,
)
from pipeproof.wings.adapters.recording import StepRecording
from pipeproof.wings.adapters.step import Drawn, FrameworkStep, Observation, Sight
from pipeproof.wings.adapters.whole import Called, Packed, Whole, by_name
from pipeproof.worlds.side_store import RanksAbsent, exchange

__all__ = ["NanotronError", "check_step", "imports", "observe", "record_step", "validate"]

NanotronError = AdapterError
imports = NANOTRON.imports

Microbatch = Mapping[str, Any]  # as a dataloader of nanotron's gives it: tensors by name
_NEEDED = ("model", "parallel_context", "optimizer", "grad_accumulator")
_COVERED = {"tensor_parallel_size": 1, "context_parallel_size": 1, "expert_parallel_size": 1}
_COVERED_MODELS = {"moe_config": None, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_NO_STEP = "optimizer.step was not called in the block: call trainer.training_step in it"


def observe(
    trainer: Any, microbatches: Sequence[Microbatch], reference: nn.Module
) -> AbstractContextManager[Observation]:
    """Observe the step trained in this block, from weights of ``reference``.

    trainer: nanotron's, or an object with its model, parallel_context, optimizer and grad_accumulator. microbatches:
    the step's, tensors by name. The result has a ``data_iterator`` for ``training_step``: for a tensor unused on this
    rank, it has a pointer to the rank that uses it. Raises ``NanotronError`` for unsupported use.
    """
    return adapter.observe(Nanotron(trainer), microbatches, reference)


def validate(
    step: Callable[[Any, list[Any]], Any],
    *,
    reference: Callable[[Any], nn.Module],
    microbatches: Sequence[Microbatch],
    ranks: int | Mapping[str, int],
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    whitebox: WhiteBox | None = None,
) -> Verdict:
    """Validate ``step(reference, microbatches)``, which trains a nanotron trainer inside ``observe``.

    reference: builds the model for a ``ParallelContext``, seeded; it is given one of a single rank. microbatches:
    tensors by name, as the model's forward takes them, for all replicas. ranks: how many, all of one pipeline; or
    ``{"pp": 2, "dp": 2}``. optimizer: makes the reference's, as for ``whitebox.validate``. whitebox: whose ranks to
    use, as pytest's fixture; None: own ones.

    Raises ``NanotronError``, and what ``whitebox.validate`` raises.
    """
    core("parallel.pipeline_parallel.engine")
    whole = whole_of(reference, NANOTRON.list_microbatches(microbatches))
    return adapter.validate(NANOTRON, step, whole, ranks=ranks, whitebox=whitebox, optimizer=optimizer)


def check_step(
    trainer: Any,
    microbatches: Sequence[Microbatch] | None,
    *,
    reference: Callable[[Any], nn.Module],
    floors: bool = True,
    timeout_s: float = 300.0,
) -> AbstractContextManager[CheckedStep]:
    """Check one ``trainer.training_step`` of a running job in this block. Every rank enters it.

    trainer: nanotron's, or an object with its model, parallel_context, optimizer and grad_accumulator. microbatches:
    those that this rank's replica trains in the step, from its dataloader; tensors behind a pointer come from their
    rank in the pipeline. None on ranks without any. reference: builds the model for a ``ParallelContext`` with a single
    rank. timeout_s also bounds the wait for other ranks' microbatches. Otherwise like ``deepspeed.check_step``.
    """
    return adapter.check_step(Nanotron(trainer), microbatches, reference=reference, floors=floors, timeout_s=timeout_s)


def record_step(
    trainer: Any, microbatches: Sequence[Microbatch] | None, path: str, *, timeout_s: float = 300.0
) -> AbstractContextManager[StepRecording]:
    """Record one step of a running job in this block, into the file at ``path``.

    trainer, microbatches: as for ``check_step``. Otherwise like ``deepspeed.record_step``.
    """
    return adapter.record_step(Nanotron(trainer), microbatches, path, timeout_s=timeout_s)


@dataclass(frozen=True)
class Nanotron(adapter.Adapter):
    """A nanotron trainer, or an object with its parts."""

    trainer: Any
    framework = NANOTRON

    def step(self) -> FrameworkStep:
        self._check_covered()
        trainer, model = self.trainer, bare(self.trainer.model)
        stage, losses, drawn, bounds = NanotronStage(model), list[Tensor](), Drawn(), list[float]()
        named = model.get_named_params_with_correct_tied()
        names = {one: name for name, one in named}
        sums = trainer.grad_accumulator

        def gradient(one: nn.Parameter) -> Tensor | None:
            """Return the accumulated gradient, the optimizer's input."""
            name = names.get(one)
            found: Tensor | None = one.grad if sums is None or name is None else sums.get_grad_buffer(name=name)
            return found

        return FrameworkStep(
            {trainer.parallel_context.pp_pg.rank(): stage} if any(True for _ in model.parameters()) else {},
            lambda _, name: name,  # blocks are numbered in the whole model, and have their names there
            lambda: {one: gradient(one) for one in names if one.requires_grad},
            partial(stage.require_observed, losses),
            partial(_watching, trainer, stage, (losses, drawn, bounds)),
            unfinished=None if trainer.optimizer is None else AdapterError(_NO_STEP),
            drawn=drawn,
            max_norm=lambda: next(iter(bounds), None),
            masters=sums is not None,  # it has them
            sum_of=gradient,
        )

    def load(self, step: FrameworkStep, microbatches: Sequence[Any], reference: nn.Module) -> Iterator[Any]:
        trainer, context = self.trainer, self.trainer.parallel_context
        self._check_count(NANOTRON.list_microbatches(microbatches))
        NANOTRON.check_neighbours(context.pp_pg.rank(), context.data_parallel_size, "nanotron's own ParallelContext")
        NANOTRON.load(step.parameters(), reference)
        if trainer.grad_accumulator is not None:  # it has copies in fp32, which the optimizer updates
            with torch.no_grad():
                for one in trainer.grad_accumulator.parameters.values():
                    one["fp32"].copy_(one["half"])
        return iter([self.share_of(one) for one in microbatches])

    def whole(self, reference: Callable[..., Any], microbatches: Sequence[Any]) -> Whole:
        self._check_count(microbatches)
        return whole_of(reference, microbatches)

    def gather(self, microbatches: Any, timeout_s: float) -> list[dict[str, Any]] | None:
        """Gather the microbatches of this rank's replica from the ranks of its pipeline."""
        group = getattr(getattr(self.trainer, "parallel_context", None), "dp_pg", None)
        replica = None if group is None else int(group.rank())  # None: the trainer does not tell
        try:
            every = exchange().gather(
                (replica, local_tensors(microbatches)), what="the step's microbatches", bound_s=timeout_s
            )
        except RanksAbsent as absent:
            raise AdapterError(f"the step's microbatches are not known: {absent}") from None
        if microbatches is not None:
            NANOTRON.list_microbatches(microbatches)
        joined = [dict(one) if isinstance(one, Mapping) else one for one in microbatches or ()]
        for own in (one for of, one in every if of == replica):
            joined = joined or [{} for _ in own]
            for one, more in zip(joined, own, strict=False):
                if isinstance(one, dict):
                    one.update({name: tensor for name, tensor in more.items() if not isinstance(one.get(name), Tensor)})
        return joined or None

    def share_of(self, microbatch: Microbatch) -> dict[str, Any]:
        """Return labels at the last stage, inputs at the first, and elsewhere pointers, like nanotron's collators."""
        pointer = core("parallel.pipeline_parallel.tensor_pointer").TensorPointer
        model, rank = bare(self.trainer.model), self.trainer.parallel_context.pp_pg.rank()
        at = {name: model.output_pp_rank if name.startswith("label") else model.input_pp_rank for name in microbatch}
        return {name: one if at[name] == rank else pointer(group_rank=at[name]) for name, one in microbatch.items()}

    def _check_covered(self) -> None:
        """Raise for unsupported use."""
        trainer, engines = self.trainer, core("parallel.pipeline_parallel.engine")
        if lacks := [name for name in _NEEDED if not hasattr(trainer, name)]:
            raise AdapterError(
                f"the trainer is a {type(trainer).__name__} without {lacks[0]}: expected nanotron's "
                f"DistributedTrainer, or what has its {', '.join(_NEEDED)}"
            )
        NANOTRON.covers(vars(trainer.parallel_context), _COVERED)
        model = bare(trainer.model)
        NANOTRON.expect("the model", model, core("models.base").NanotronModel, "a NanotronModel")
        _check_model(model)
        engine = getattr(trainer, "pipeline_engine", None)
        if engine is not None:
            NANOTRON.expect("the pipeline engine", engine, engines.PipelineEngine, "one of nanotron's")
        block = core("parallel.pipeline_parallel.block").PipelineBlock
        blocks = [(name, one.rank) for name, one in model.named_modules() if isinstance(one, block)]
        for (before, rank), (name, other) in pairwise(blocks):
            if other < rank:
                raise AdapterError(
                    f"block {before} is on rank {rank}, and {name} behind it on {other}: {NANOTRON.adapter} covers "
                    "blocks that lie on the ranks in order"
                )

    def _check_count(self, microbatches: Sequence[Any]) -> None:
        count = getattr(self.trainer, "n_micro_batches_per_batch", None)
        NANOTRON.expect_count("batch_accumulation_per_replica", count, len(microbatches))


@contextmanager
def _watching(
    trainer: Any, stage: NanotronStage, notes: tuple[list[Tensor], Drawn, list[float]], sight: Sight
) -> Iterator[None]:
    """Note losses, data and clipping bounds; notify ``sight`` of gradients before clipping, and the norm."""
    (losses, drawn, bounds), completed = notes, False

    def complete() -> None:
        nonlocal completed
        if not completed:
            completed = True
            sight.complete()

    def drawing(train: Any, model: Any, pg: Any, batch: Any, *more: Any, **named: Any) -> Any:
        return train(model, pg, drawn.noting(batch), *more, **named)

    def stepping(step: Any, *given: Any, **named: Any) -> Any:
        nonlocal completed
        complete()
        completed = False
        return step(*given, **named)

    with ExitStack() as stack:
        stack.enter_context(stage.noting(losses))
        stack.enter_context(clipping_noted(complete, bounds, sight))
        if hasattr(getattr(trainer, "pipeline_engine", None), "train_batch_iter"):
            stack.enter_context(around(trainer.pipeline_engine, "train_batch_iter", drawing))
        if trainer.optimizer is not None:
            stack.enter_context(around(trainer.optimizer, "step", stepping))
        yield


def local_tensors(microbatches: Any) -> list[dict[str, Tensor]]:
    """Return this rank's tensors on the CPU, because other ranks have other devices."""
    if not isinstance(microbatches, Sequence):
        return []
    named = [one if isinstance(one, Mapping) else {} for one in microbatches]
    return [{name: one.cpu() for name, one in each.items() if isinstance(one, Tensor)} for each in named]


def whole_of(reference: Callable[..., Any], microbatches: Sequence[Any]) -> Whole:
    """Return the whole model, which computes its own loss."""
    for number, one in enumerate(microbatches):
        if not isinstance(one, Mapping) or not one:
            raise AdapterError(f"microbatch {number} is a {type(one).__name__}: expected tensors by name")
        if other := [name for name, value in one.items() if not isinstance(value, Tensor)]:
            found = f"a {type(one[other[0]]).__name__} as {other[0]}"
            raise AdapterError(f"microbatch {number} has {found}: expected tensors only")
    named = [by_name(one) for one in microbatches]
    packed = Packed.of(named)
    data = [packed.pack(one) for one in named]
    return Whole(reference, partial(build, reference, packed), data, given=packed.unpack, alone=as_launched)


def build(reference: Callable[..., Any], packed: Packed) -> Called:
    """Build the whole model on one rank, called with a full packed microbatch."""
    with pretend_alone():
        model = NANOTRON.build(reference, context_of_one())
    NANOTRON.expect("the reference", model, nn.Module, "a model of nanotron's")
    _check_model(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    tied = model.get_embeddings_lm_head_tied_names() if hasattr(model, "get_embeddings_lm_head_tied_names") else []
    both = [name for name in tied if name in named]
    if len({id(named[name]) for name in both}) > 1:
        raise AdapterError(
            f"the reference does not tie {' and '.join(both)}: call nanotron.trainer.mark_tied_parameters in it"
        )
    return Called(model, packed, _call)


def _call(model: Any, microbatch: Microbatch) -> Tensor:
    with pretend_alone():
        output = model(**microbatch)
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def _check_model(model: nn.Module) -> None:
    """Raise for an unsupported model."""
    NANOTRON.covers(vars(getattr(model, "config", None) or nn.Module()), _COVERED_MODELS)
    NANOTRON.check_dropout(model)
