"""Record a training step on one device: a plain loop over the microbatches, for any model."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.comparison import expect_operation
from pipeproof.core.contract import DEFAULTS, Contract
from pipeproof.core.floors import Floors
from pipeproof.core.limits import PRECISIONS
from pipeproof.core.measured import versions
from pipeproof.core.nudged import Nudged
from pipeproof.core.updates import Pending, Updates
from pipeproof.records.record import (
    Record,
    RecordedFloors,
    RecordedOperation,
    RecordError,
    content_digests,
    microbatch_digests,
)
from pipeproof.records.record_file import write
from pipeproof.reference.accumulation import PLAIN
from pipeproof.reference.copied import deep_copy
from pipeproof.reference.data import Batch
from pipeproof.reference.products import settings_off
from pipeproof.reference.snapshot import keep_unchanged
from pipeproof.reference.step import Gradient, Loss, Recipe, Reference, Site, clip_factor, sgd
from pipeproof.worlds.output_file import OutputFile

_NAMES = {dtype: one.name for dtype, one in PRECISIONS.items() if not dtype.is_complex}

LossFn = Callable[..., Tensor]
Pairs = Sequence[tuple[object, object]]
Stages = Mapping[str, Collection[int]]


def record_step(
    model: nn.Module,
    microbatches: Pairs,
    *,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer | None = None,
    contract: Contract = DEFAULTS,
    floors: bool = True,
    **words: Any,
) -> Record:
    """Record a correct training step: losses, gradients, their norm, and the parameters after it.

    The step runs on a copy: ``model``, ``optimizer`` and everything reachable from them and ``loss_fn`` stay unchanged.
    The optimizer's state counts.

    microbatches: pairs of inputs and target. loss_fn: of output and target, a microbatch's scalar loss. optimizer:
    without one there are no parameters after the step. contract: the step's claims; ``loss_divisor``, ``loss_scale``,
    ``accumulation`` and ``max_norm`` are read. floors: measure rounding, by two more passes, one in fp64, and in bf16
    and fp16 by eight more. Without floors, small errors are "unknown".

    Raises ``RecordError`` for a model that does not repeat its loss or has nothing to train, ``LossError`` for a loss
    that cannot be differentiated, and ``ContractError`` for an unread word.
    """
    contract = contract.with_words(words)
    contract.reads(("loss_divisor", "loss_scale", "accumulation", "max_norm"), "where a step is recorded")
    recipe = recipe_of(contract, loss_of(contract, loss_fn, len(microbatches)))
    with keep_unchanged(model, optimizer, loss_fn, microbatches):
        return make_record(model, microbatches, recipe, optimizer=optimizer, floors=floors, moves=floors)


def loss_of(contract: Contract, loss_fn: LossFn, microbatches: int) -> Loss:
    """Build the loss for so many microbatches, with its divisor by ``contract``."""
    return Loss(loss_fn, float(contract.loss_divisor or microbatches))


def recipe_of(contract: Contract, loss: Loss, shares: tuple[tuple[int, ...], ...] = ()) -> Recipe:
    """Build the recipe for a step by ``contract`` with this ``loss``; ``shares``: each replica's microbatches."""
    by = replace(contract.accumulation or PLAIN, shares=shares)
    late = float(contract.loss_scale or 1.0) * (loss.divisor if by.late else 1.0)
    return Recipe(loss, contract.max_norm or math.inf, late=late, accumulation=by)


def make_record(
    model: nn.Module,
    microbatches: Pairs,
    recipe: Recipe,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    floors: bool = True,
    moves: bool = False,
    stages: Stages = MappingProxyType({}),
) -> Record:
    """Record a step by ``recipe``, without its optimizer; otherwise like ``record_step``.

    moves: also measure the effect of weights one rounding off; a caller with the model may do so on demand. stages: by
    name, the stages of each parameter; a parameter in several is first added up in each.
    """
    if not microbatches:
        raise RecordError("microbatches is empty: expected at least one")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecordError(f"the model, a {type(model).__name__}, has no parameter to train: nothing could be compared")
    step = _perform(model, microbatches, recipe, optimizer, stages)
    beside, expected = _reference(deep_copy(model), recipe, stages), step.expected
    updated = None if optimizer is None else partial(_update, model, optimizer, recipe, stages)
    measured, products = _floors(beside, step, moves=moves, updated=updated) if floors else (None, {})
    operation = expect_operation(expected)
    operation = replace(
        operation, microbatches=microbatch_digests(microbatches), parameters=operation.parameters if optimizer else {}
    )
    contents = content_digests(microbatches)
    operation = RecordedOperation(**vars(operation), floors=measured, contents=contents)
    config = _config(model, microbatches, recipe)
    return Record("expected", config | ({"products": products} if floors else {}), (operation,))


def measure_nudged(model: nn.Module, microbatches: Pairs, recipe: Recipe, *, stages: Stages) -> Nudged | None:
    """Measure the effect of weights one rounding off on the step; None without a narrow type."""
    step = _perform(model, microbatches, recipe, None, stages)
    return Floors(_reference(deep_copy(model), recipe, stages), [step]).moved


def _perform(
    model: nn.Module, microbatches: Pairs, recipe: Recipe, optimizer: torch.optim.Optimizer | None, stages: Stages
) -> Pending:
    """Run the step on a copy."""
    own, stepping = deep_copy((model, optimizer))
    batches = [Batch.of(*pair).to(str(next(own.parameters()).device)) for pair in microbatches]
    recipe = replace(recipe, optimizer=lambda some: stepping or sgd(some))
    orders = dict.fromkeys({0, *(one for held in stages.values() for one in held)}, range(len(batches)))
    expected = _reference(own, recipe, stages).perform("train", batches, orders=orders)
    return Pending(expected, batches, orders)


def write_record(record: Record, path: str) -> None:
    """Write ``record`` to a file, whole or not at all; only rank 0 of a launcher does."""
    with OutputFile(path) as file:
        write(record, file)


def _reference(model: nn.Module, recipe: Recipe, stages: Stages) -> Reference:
    """Wrap ``model`` with these ``stages``; a single stage if unknown."""
    held = {name: sorted(stages.get(name, (0,))) for name, _ in model.named_parameters(remove_duplicate=False)}
    copies = [(stage, name) for name, own in held.items() for stage in own[1:]]
    owner = {name: own[0] for name, own in held.items()}
    return Reference(model, owner=owner, recipe=recipe, copies=copies, by_use=bool(copies))


def _update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    stages: Stages,
    gradients: Mapping[Site, Gradient],
    *,
    norm: float | None = None,
    off: float = 0.0,
) -> Mapping[Site, Tensor]:
    """Update parameters by the optimizer with these gradients; model and optimizer stay unchanged."""
    own, stepping = deep_copy((model, optimizer))
    reference = _reference(own, replace(recipe, optimizer=lambda _: settings_off(stepping, off)), stages)
    return reference.step(gradients, clip_factor(reference.norm(gradients) if norm is None else norm, recipe.max_norm))


def _floors(
    reference: Reference, step: Pending, *, moves: bool, updated: Updates | None
) -> tuple[RecordedFloors, Mapping[str, str]]:
    """Measure rounding of every number in ``step``, and of fp32 products.

    ``reference`` has its initial state.
    """
    again = reference.of(deep_copy(reference.model)).contributing(step.batches[::-1])
    check_repeated(step.expected.losses, [one.loss for one in again][::-1])
    floors = Floors(reference, [step], updated=updated)
    found = RecordedFloors.measure(step.expected, floors, moved=moves, updates=updated is not None)
    return found, floors.products


def check_repeated(losses: Sequence[float], others: Sequence[float]) -> None:
    """Raise ``RecordError`` unless a rerun repeats the losses."""
    for number, (loss, other) in enumerate(zip(losses, others, strict=True)):
        if loss != other and (loss == loss or other == other):
            raise RecordError(
                f"the model does not give the same loss twice: microbatch {number} {loss:.9g}, then {other:.9g}; "
                "seed what it draws from the microbatch, or switch it off"
            )


def _config(model: nn.Module, microbatches: Pairs, recipe: Recipe) -> dict[str, object]:
    assert isinstance(recipe.loss, Loss), "a loss of one's own"
    dtypes = {_NAMES.get(parameter.dtype, str(parameter.dtype)) for parameter in model.parameters()}
    return {
        "model": type(model).__name__,
        "microbatches": len(microbatches),
        "loss_divisor": recipe.loss.divisor,
        "max_norm": recipe.max_norm if recipe.max_norm < math.inf else None,
        "dtype": "+".join(sorted(dtypes)),
        **versions(),
    }
