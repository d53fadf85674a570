"""Nanotron: a step that pipeproof starts, or one of a running job.

A user's step makes its trainer as ever and calls ``training_step`` inside ``observed``. The reference is made by the
function that builds the model. Nothing of nanotron is imported before one of these is called.
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
from pipeproof.wings.adapters.adapter import Adapter
from pipeproof.wings.adapters.drawn import Drawn
from pipeproof.wings.adapters.framework import AdapterError, around
from pipeproof.wings.adapters.nanotron_place import (
    NANOTRON,
    NanotronStage,
    alone,
    as_launched,
    bare,
    clipping_noted,
    context_of_one,
    core,
)
from pipeproof.wings.adapters.recording import StepRecording
from pipeproof.wings.adapters.sight import Observation
from pipeproof.wings.adapters.step import FrameworkStep, Sight
from pipeproof.wings.adapters.whole import Called, Packed, Whole, by_name
from pipeproof.worlds.side_store import RanksAbsent, exchange

__all__ = ["NanotronError", "check_step", "imports", "observed", "record_step", "validate"]

NanotronError = AdapterError
imports = NANOTRON.imports

Microbatch = Mapping[str, Any]  # as a dataloader of nanotron's gives it: tensors by name
_NEEDED = ("model", "parallel_context", "optimizer", "grad_accumulator")
_COVERED = {"tensor_parallel_size": 1, "context_parallel_size": 1, "expert_parallel_size": 1}
_COVERED_MODELS = {"moe_config": None, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_NO_STEP = "optimizer.step was not called in the block: call trainer.training_step in it"


def observed(
    trainer: Any, microbatches: Sequence[Microbatch], reference: nn.Module
) -> AbstractContextManager[Observation]:
    """Observe the step that is trained inside this, from the weights of ``reference``.

    trainer: nanotron's, or what has its model, parallel_context, optimizer and grad_accumulator. microbatches: as the
    step is given them, tensors by name. What this gives has a ``data_iterator`` for ``training_step``: where this rank
    has no use for a tensor, it has a pointer to the rank that has. Raises ``NanotronError`` for what is not covered.
    """
    return adapter.observed(Nanotron(trainer), microbatches, reference)


def validate(
    step: Callable[[Any, list[Any]], Any],
    *,
    reference: Callable[[Any], nn.Module],
    microbatches: Sequence[Microbatch],
    ranks: int | Mapping[str, int],
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    whitebox: WhiteBox | None = None,
) -> Verdict:
    """The verdict on ``step(reference, microbatches)``, which trains a trainer of nanotron's inside ``observed``.

    reference: builds the model for a ``ParallelContext``, seeded; it is given one of a single rank. microbatches:
    tensors by name, as the model's forward takes them, for all replicas. ranks: how many, all of one pipeline; or
    ``{"pp": 2, "dp": 2}``. optimizer: makes the reference's, as for ``whitebox.validate``. whitebox: whose ranks to
    use, as pytest's fixture; None: own ones.

    Raises ``NanotronError``, and what ``whitebox.validate`` raises.
    """
    core("parallel.pipeline_parallel.engine")
    whole = whole_of(reference, NANOTRON.listed(microbatches))
    return adapter.validate(NANOTRON, step, whole, ranks=ranks, whitebox=whitebox, optimizer=optimizer)


def check_step(
    trainer: Any,
    microbatches: Sequence[Microbatch] | None,
    *,
    reference: Callable[[Any], nn.Module],
    floors: bool = True,
    timeout_s: float = 300.0,
) -> AbstractContextManager[CheckedStep]:
    """A context manager around one ``trainer.training_step`` of a running job. Every rank enters it.

    trainer: nanotron's, or what has its model, parallel_context, optimizer and grad_accumulator. microbatches: those
    that this rank's replica trains in the step, as its dataloader gives them: what this rank has a pointer for comes
    from the rank of its pipeline that has it. None on a rank that has nothing of them. reference: builds the model for
    a ``ParallelContext``; it is given one of a single rank. timeout_s bounds the wait for other ranks' microbatches,
    too. All else is as for ``deepspeed.check_step``.
    """
    return adapter.check_step(Nanotron(trainer), microbatches, reference=reference, floors=floors, timeout_s=timeout_s)


def record_step(
    trainer: Any, microbatches: Sequence[Microbatch] | None, path: str, *, timeout_s: float = 300.0
) -> AbstractContextManager[StepRecording]:
    """A context manager around one step of a running job, which writes what the step gave into the file at ``path``.

    trainer, microbatches: as for ``check_step``. All else is as for ``deepspeed.record_step``.
    """
    return adapter.record_step(Nanotron(trainer), microbatches, path, timeout_s=timeout_s)


@dataclass(frozen=True)
class Nanotron(Adapter):
    """A trainer of nanotron's, or what has its parts."""

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
            """What microbatches' gradients are added to, and the optimizer takes."""
            name = names.get(one)
            found: Tensor | None = one.grad if sums is None or name is None else sums.get_grad_buffer(name=name)
            return found

        return FrameworkStep(
            {trainer.parallel_context.pp_pg.rank(): stage} if any(True for _ in model.parameters()) else {},
            lambda _, name: name,  # blocks are numbered in the whole model, and have their names there
            lambda: {one: gradient(one) for one in names if one.requires_grad},
            partial(stage.seen, losses),
            partial(_watching, trainer, stage, (losses, drawn, bounds)),
            unfinished=None if trainer.optimizer is None else AdapterError(_NO_STEP),
            drawn=drawn,
            max_norm=lambda: next(iter(bounds), None),
            masters=sums is not None,  # it has them
            sum_of=gradient,
        )

    def load(self, step: FrameworkStep, microbatches: Sequence[Any], reference: nn.Module) -> Iterator[Any]:
        trainer, context = self.trainer, self.trainer.parallel_context
        self._check_count(NANOTRON.listed(microbatches))
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

    def gathered(self, microbatches: Any, timeout_s: float) -> list[dict[str, Any]] | None:
        """The microbatches of this rank's replica with what the ranks of its pipeline have of each."""
        group = getattr(getattr(self.trainer, "parallel_context", None), "dp_pg", None)
        replica = None if group is None else int(group.rank())  # None: the trainer does not tell
        try:
            every = exchange().gather((replica, held(microbatches)), what="the step's microbatches", bound_s=timeout_s)
        except RanksAbsent as absent:
            raise AdapterError(f"the step's microbatches are not known: {absent}") from None
        if microbatches is not None:
            NANOTRON.listed(microbatches)
        joined = [dict(one) if isinstance(one, Mapping) else one for one in microbatches or ()]
        for own in (one for of, one in every if of == replica):
            joined = joined or [{} for _ in own]
            for one, more in zip(joined, own, strict=False):
                if isinstance(one, dict):
                    one.update({name: tensor for name, tensor in more.items() if not isinstance(one.get(name), Tensor)})
        return joined or None

    def share_of(self, microbatch: Microbatch) -> dict[str, Any]:
        """What this rank has of a microbatch, as nanotron's collators give it: labels at the last stage, the rest at
        the first, and elsewhere a pointer to the rank that has it."""
        pointer = core("parallel.pipeline_parallel.tensor_pointer").TensorPointer
        model, rank = bare(self.trainer.model), self.trainer.parallel_context.pp_pg.rank()
        at = {name: model.output_pp_rank if name.startswith("label") else model.input_pp_rank for name in microbatch}
        return {name: one if at[name] == rank else pointer(group_rank=at[name]) for name, one in microbatch.items()}

    def _check_covered(self) -> None:
        """Raise for what would be judged wrongly."""
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
    """While this is open, note losses, data and bounds of clipping, and tell ``sight`` of gradients before it, and the
    norm."""
    (losses, drawn, bounds), told = notes, False

    def complete() -> None:
        nonlocal told
        if not told:
            told = True
            sight.complete()

    def drawing(train: Any, model: Any, pg: Any, batch: Any, *more: Any, **named: Any) -> Any:
        return train(model, pg, drawn.noting(batch), *more, **named)

    def stepping(step: Any, *given: Any, **named: Any) -> Any:
        nonlocal told
        complete()
        told = False
        return step(*given, **named)

    with ExitStack() as stack:
        stack.enter_context(stage.noting(losses))
        stack.enter_context(clipping_noted(complete, bounds, sight))
        if hasattr(getattr(trainer, "pipeline_engine", None), "train_batch_iter"):
            stack.enter_context(around(trainer.pipeline_engine, "train_batch_iter", drawing))
        if trainer.optimizer is not None:
            stack.enter_context(around(trainer.optimizer, "step", stepping))
        yield


def held(microbatches: Any) -> list[dict[str, Tensor]]:
    """The tensors that this rank has of them, on the CPU: they go to ranks that have other devices."""
    if not isinstance(microbatches, Sequence):
        return []
    named = [one if isinstance(one, Mapping) else {} for one in microbatches]
    return [{name: one.cpu() for name, one in each.items() if isinstance(one, Tensor)} for each in named]


def whole_of(reference: Callable[..., Any], microbatches: Sequence[Any]) -> Whole:
    """The whole model, which gives the loss itself."""
    for number, one in enumerate(microbatches):
        if not isinstance(one, Mapping) or not one:
            raise AdapterError(f"microbatch {number} is a {type(one).__name__}: expected tensors by name")
        if other := [name for name, value in one.items() if not isinstance(value, Tensor)]:
            found = f"a {type(one[other[0]]).__name__} as {other[0]}"
            raise AdapterError(f"microbatch {number} has {found}: expected tensors only")
    named = [by_name(one) for one in microbatches]
    packed = Packed.of(named)

    def given(model: Any, microbatches: list[Any]) -> tuple[Any, list[Any]]:
        return model, [packed.unpack(one) for one in microbatches]

    data = [packed.pack(one) for one in named]
    return Whole(reference, partial(built, reference, packed), data, given=given, alone=as_launched)


def built(reference: Callable[..., Any], packed: Packed) -> Called:
    """The whole model on one rank, called with all of a packed microbatch."""
    with alone():
        model = NANOTRON.built(reference, context_of_one())
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
    with alone():
        output = model(**microbatch)
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def _check_model(model: nn.Module) -> None:
    """Raise for a model that would be judged wrongly."""
    NANOTRON.covers(vars(getattr(model, "config", None) or nn.Module()), _COVERED_MODELS)
    NANOTRON.check_dropout(model)
