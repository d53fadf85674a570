"""Nanotron under ``whitebox.validate``: where its microbatches, losses, gradients, norm and names are.

A user's step makes its trainer as ever and calls ``training_step`` inside ``observed``. ``validate`` takes the
reference from the function that builds the model. Nothing of nanotron is imported before one of these is called.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from inspect import signature
from itertools import pairwise
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeproof.core.verdict import Verdict
from pipeproof.foreign.frameworks.drawn import Drawn
from pipeproof.foreign.frameworks.framework import Named, Packed, around, launched
from pipeproof.foreign.frameworks.framework_step import FrameworkStep, Observation, Sight, observing
from pipeproof.foreign.frameworks.nanotron_whole import (
    NANOTRON,
    Microbatch,
    NanotronError,
    WholeNanotron,
    check_model,
    core,
    packed_of,
)
from pipeproof.foreign.handed_back import Gradient
from pipeproof.foreign.validator import WhiteBox
from pipeproof.observers.hook import Hook
from pipeproof.worlds.fence import Fence

_NEEDED = ("model", "parallel_context", "optimizer", "grad_accumulator")
_COVERED = {"tensor_parallel_size": 1, "context_parallel_size": 1, "expert_parallel_size": 1}
_NO_STEP = "optimizer.step was not called in the block: call trainer.training_step in it"


class NanotronStage(nn.Module):
    """What this rank has of a model, whose blocks receive and send inside its forward.

    So that an observer sees a stage that is given tensors and makes some, this is called when a forward is over: with
    ``taken``, what the microbatch has here and what came from the stage before. It gives ``made``, what went to the
    next stage, or the loss.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self.taken: list[Tensor] = []
        self.made: list[Tensor] = []
        self.fence = Fence()

    def seen(self, losses: list[Tensor]) -> list[Tensor]:
        """``losses``; raises ``NanotronError`` where not all forwards were seen."""
        if self.fence.broken:
            raise NanotronError(f"a forward of the model was not seen: {self.fence.broken}")
        return losses

    def forward(self, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.made)

    @contextmanager
    def noting(self, losses: list[Tensor]) -> Iterator[None]:
        """While this is open, every forward of the model is also a call of this one, and ``losses`` grow."""
        place = core("parallel.pipeline_parallel.block")

        def received(take: Any, *given: Any, **named: Any) -> Any:
            tensor = take(*given, **named)
            self.taken.append(tensor)
            return tensor

        def sent(send: Any, tensor: Tensor, *given: Any, **named: Any) -> Any:
            self.made.append(tensor)
            return send(tensor, *given, **named)

        def begins(_: nn.Module, __: Any, named: Mapping[str, Any]) -> None:
            self.taken = [named[name] for name in sorted(named) if isinstance(named[name], Tensor)]
            self.made = []

        def ended(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
            loss = output["loss"] if isinstance(output, Mapping) else output
            if isinstance(loss, Tensor):
                losses.append(loss.detach().clone())
                self.made.append(loss)
            self(*self.taken)
            self.taken, self.made = [], []

        with ExitStack() as stack:
            stack.enter_context(around(place, "recv_from_pipeline_state_buffer", received))
            stack.enter_context(around(place, "send_to_pipeline_state_buffer", sent))
            before, after = (Hook(self.model, self.fence.around(one)) for one in (begins, ended))
            stack.callback(self.model.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(self.model.register_forward_hook(after, with_kwargs=True).remove)
            yield


def bare(model: Any) -> Any:
    """The model in ``model``, without torch's DDP around it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def gradients_of(trainer: Any) -> dict[nn.Parameter, Gradient]:
    """The gradients that the trainer's optimizer is about to take, where it has them."""
    sums = trainer.grad_accumulator
    named = bare(trainer.model).get_named_params_with_correct_tied()
    return {
        one: one.grad if sums is None else sums.get_grad_buffer(name=name) for name, one in named if one.requires_grad
    }


def _sum_of(trainer: Any, names: Mapping[nn.Parameter, str], parameter: nn.Parameter) -> Tensor | None:
    sums, name = trainer.grad_accumulator, names.get(parameter)
    found: Tensor | None = parameter.grad if sums is None or name is None else sums.get_grad_buffer(name=name)
    return found


def step_of(trainer: Any) -> FrameworkStep:
    """The step of this trainer on this rank; raises ``NanotronError`` for what is not covered."""
    check_covered(trainer)
    model, losses, drawn, bounds = bare(trainer.model), list[Tensor](), Drawn(), list[float]()
    stage = NanotronStage(model)
    number: int = trainer.parallel_context.pp_pg.rank()
    return FrameworkStep(
        {number: stage} if any(True for _ in model.parameters()) else {},
        lambda _, name: name,  # blocks are numbered in the whole model, and have their names there
        partial(gradients_of, trainer),
        partial(stage.seen, losses),
        partial(_watching, trainer, stage, (losses, drawn, bounds)),
        unfinished=None if trainer.optimizer is None else NanotronError(_NO_STEP),
        drawn=drawn,
        max_norm=lambda: next(iter(bounds), None),
        masters=trainer.grad_accumulator is not None,  # it has them
        sum_of=partial(_sum_of, trainer, {one: name for name, one in model.get_named_params_with_correct_tied()}),
    )


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
        stack.enter_context(_clipping_noted(complete, bounds, sight))
        if hasattr(getattr(trainer, "pipeline_engine", None), "train_batch_iter"):
            stack.enter_context(around(trainer.pipeline_engine, "train_batch_iter", drawing))
        if trainer.optimizer is not None:
            stack.enter_context(around(trainer.optimizer, "step", stepping))
        yield


@contextmanager
def _clipping_noted(complete: Callable[[], None], bounds: list[float], sight: Sight) -> Iterator[None]:
    """While this is open, note the first norm by which nanotron clips, and to which bound.

    Scripts import the function by name, so that it is replaced where all find it: inside torch's wrapper around it.
    """
    cell = _inside(core("optim.clip_grads").clip_grad_norm)
    clip = cell.cell_contents
    bound = signature(clip).bind

    @wraps(clip)
    def noted(*given: Any, **named: Any) -> Any:
        complete()
        norm = clip(*given, **named)
        if not bounds:
            bounds.append(float(bound(*given, **named).arguments["max_norm"]))
            sight.norm(norm)
        return norm

    cell.cell_contents = noted
    try:
        yield
    finally:
        cell.cell_contents = clip


def _inside(function: Any) -> CellType:
    """Where torch's decorator keeps the function that it wraps."""
    names = function.__code__.co_freevars
    if "func" not in names:
        raise NanotronError("clip_grad_norm is not wrapped by torch's record_function: this pipeproof knows no other")
    cell: CellType = function.__closure__[names.index("func")]
    return cell


@contextmanager
def observed(trainer: Any, microbatches: Sequence[Microbatch], reference: nn.Module) -> Iterator[Observation]:
    """Observe the step that is trained inside this, from the weights of ``reference``.

    trainer: nanotron's, or what has its model, parallel_context, optimizer and grad_accumulator. microbatches: as the
    step is given them, tensors by name. What this gives has a ``data_iterator`` for ``training_step``: where this rank
    has no use for a tensor, it has a pointer to the rank that has. Raises ``NanotronError`` for what is not covered.
    """
    step = step_of(trainer)
    check_count(trainer, NANOTRON.listed(microbatches))
    context = trainer.parallel_context
    NANOTRON.check_neighbours(context.pp_pg.rank(), context.data_parallel_size, "nanotron's own ParallelContext")
    load(trainer, step, reference)
    seen = Observation(step, iter([cut(one, trainer) for one in microbatches]))
    with observing(seen, step):
        yield seen


def load(trainer: Any, step: FrameworkStep, reference: nn.Module) -> None:
    """Give the stages the weights of ``reference``, and the copies in fp32 that the optimizer updates.

    Raises ``NanotronError`` where the reference has no such parameter, or one of another shape or type.
    """
    NANOTRON.load(step.parameters(), reference)
    if trainer.grad_accumulator is not None:
        with torch.no_grad():
            for one in trainer.grad_accumulator.parameters.values():
                one["fp32"].copy_(one["half"])


def cut(microbatch: Microbatch, trainer: Any) -> dict[str, Any]:
    """What this rank has of a microbatch, as nanotron's collators give it: labels at the last stage, the rest at the
    first, and elsewhere a pointer to the rank that has it."""
    pointer = core("parallel.pipeline_parallel.tensor_pointer").TensorPointer
    model, rank = bare(trainer.model), trainer.parallel_context.pp_pg.rank()
    at = {name: model.output_pp_rank if name.startswith("label") else model.input_pp_rank for name in microbatch}
    return {name: one if at[name] == rank else pointer(group_rank=at[name]) for name, one in microbatch.items()}


def check_covered(trainer: Any) -> None:
    """Raise ``NanotronError`` for what would be judged wrongly."""
    engines = core("parallel.pipeline_parallel.engine")
    if lacks := [name for name in _NEEDED if not hasattr(trainer, name)]:
        raise NanotronError(
            f"the trainer is a {type(trainer).__name__} without {lacks[0]}: expected nanotron's DistributedTrainer, "
            f"or what has its {', '.join(_NEEDED)}"
        )
    NANOTRON.covers(vars(trainer.parallel_context), _COVERED)
    model = bare(trainer.model)
    if not isinstance(model, core("models.base").NanotronModel):
        raise NanotronError(f"the model is a {type(model).__name__}: expected a NanotronModel")
    check_model(model)
    engine = getattr(trainer, "pipeline_engine", None)
    if engine is not None and not isinstance(engine, engines.PipelineEngine):
        raise NanotronError(f"the pipeline engine is a {type(engine).__name__}: expected one of nanotron's")
    block = core("parallel.pipeline_parallel.block").PipelineBlock
    blocks = [(name, one.rank) for name, one in model.named_modules() if isinstance(one, block)]
    for (before, rank), (name, other) in pairwise(blocks):
        if other < rank:
            raise NanotronError(
                f"block {before} is on rank {rank}, and {name} behind it on {other}: {NANOTRON.adapter} covers blocks "
                "that lie on the ranks in order"
            )


def check_count(trainer: Any, microbatches: Sequence[Any]) -> None:
    """Raise ``NanotronError`` unless the trainer takes a step of so many."""
    count = getattr(trainer, "n_micro_batches_per_batch", None)
    NANOTRON.check_count("batch_accumulation_per_replica", count, len(microbatches))


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
    packed = packed_of(NANOTRON.listed(microbatches))
    return NANOTRON.judge(whitebox)(
        Named(step, partial(_left_as_it_was, step, packed)),
        reference=Named(reference, partial(WholeNanotron, reference, packed.names)),
        microbatches=[packed.pack(one) for one in microbatches],
        ranks=NANOTRON.mesh(ranks),
        loss_fn=None,
        optimizer=optimizer,
    )


def _left_as_it_was(
    step: Callable[[Any, list[Any]], Any], packed: Packed, model: nn.Module, microbatches: Sequence[Any]
) -> Any:
    """Run a step as a launcher would, and leave nanotron as it was: the next layout can be another."""
    with launched(), _state_kept():
        return step(model, [packed.unpack(one) for one in microbatches])


@contextmanager
def _state_kept() -> Iterator[None]:
    """While this is open, what nanotron keeps for the life of a process is of this step alone."""
    ranks, states = core("distributed"), core("parallel.pipeline_parallel.state")
    kinds = (states.PipelineBatchState, states.PipelineTrainBatchState, states.PipelineEvalBatchState)
    queues = [one for kind in kinds for one in vars(kind).values() if isinstance(one, deque)]

    def forget() -> None:
        for cached in (ranks.get_rank, ranks.get_global_rank):
            cached.cache_clear()
        for queue in queues:
            queue.clear()

    forget()
    try:
        yield
    finally:
        forget()
