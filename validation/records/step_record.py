"""The record of one training step of anyone's model on one device: a plain loop over the microbatches."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.comparison import due_of
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
from pipeproof.reference.copied import copied
from pipeproof.reference.data import Batch
from pipeproof.reference.products import settings_off
from pipeproof.reference.snapshot import unchanged
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
    """What a correct training step gives: losses, gradients, their norm, and the parameters after it.

    The step is made on a copy: ``model`` and ``optimizer`` stay as they are, and so does what they and ``loss_fn`` lead
    to. The optimizer's state counts.

    microbatches: pairs of inputs and target. loss_fn: of output and target, a microbatch's scalar loss. optimizer:
    without one there are no parameters after the step. contract: what the step claims; ``loss_divisor``,
    ``loss_scale``, ``accumulation`` and ``max_norm`` are read. floors: measure what rounding does, by two more passes,
    one of them in fp64, and in bf16 and fp16 by eight more. Without floors, what is a little off is "unknown".

    Raises ``RecordError`` for a model that does not give the same loss twice or has nothing to train, ``LossError`` for
    a loss that cannot be differentiated, and ``ContractError`` for a word that is not read.
    """
    contract = contract.with_words(words)
    contract.reads(("loss_divisor", "loss_scale", "accumulation", "max_norm"), "where a step is recorded")
    recipe = recipe_of(contract, loss_of(contract, loss_fn, len(microbatches)))
    with unchanged(model, optimizer, loss_fn, microbatches):
        return recorded(model, microbatches, recipe, optimizer=optimizer, floors=floors, moves=floors)


def loss_of(contract: Contract, loss_fn: LossFn, microbatches: int) -> Loss:
    """The loss in a step of so many microbatches, with its divisor by ``contract``."""
    return Loss(loss_fn, float(contract.loss_divisor or microbatches))


def recipe_of(contract: Contract, loss: Loss, shares: tuple[tuple[int, ...], ...] = ()) -> Recipe:
    """How a step with this ``loss`` is made by ``contract``; ``shares``: the microbatches of each replica."""
    by = replace(contract.accumulation or PLAIN, shares=shares)
    late = float(contract.loss_scale or 1.0) * (loss.divisor if by.late else 1.0)
    return Recipe(loss, contract.max_norm or math.inf, late=late, accumulation=by)


def recorded(
    model: nn.Module,
    microbatches: Pairs,
    recipe: Recipe,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    floors: bool = True,
    moves: bool = False,
    stages: Stages = MappingProxyType({}),
) -> Record:
    """As ``record_step``, of a step by this ``recipe``, whose own optimizer is left aside.

    moves: measure how far weights that are one rounding off move it, too: who keeps the model may do so when it is
    asked for. stages: those that hold each parameter, by name; what is used in several is added up in each of them
    first.
    """
    if not microbatches:
        raise RecordError("microbatches is empty: expected at least one")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecordError(f"the model, a {type(model).__name__}, has no parameter to train: nothing could be compared")
    step = _performed(model, microbatches, recipe, optimizer, stages)
    beside, expected = _reference(copied(model), recipe, stages), step.expected
    updated = None if optimizer is None else partial(_updated, model, optimizer, recipe, stages)
    measured, products = _floors(beside, step, moves=moves, updated=updated) if floors else (None, {})
    due = due_of(expected)
    due = replace(due, microbatches=microbatch_digests(microbatches), parameters=due.parameters if optimizer else {})
    contents = content_digests(microbatches)
    operation = RecordedOperation(**vars(due), floors=measured, contents=contents)
    config = _config(model, microbatches, recipe)
    return Record("expected", config | ({"products": products} if floors else {}), (operation,))


def moved(model: nn.Module, microbatches: Pairs, recipe: Recipe, *, stages: Stages) -> Nudged | None:
    """How far weights that are one rounding off move what is ``recorded``; None where it is in no narrow type."""
    step = _performed(model, microbatches, recipe, None, stages)
    return Floors(_reference(copied(model), recipe, stages), [step]).moved


def _performed(
    model: nn.Module, microbatches: Pairs, recipe: Recipe, optimizer: torch.optim.Optimizer | None, stages: Stages
) -> Pending:
    """The step, made on a copy."""
    own, stepping = copied((model, optimizer))
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
    """``model`` in these ``stages``; all of it in one where they are not known."""
    held = {name: sorted(stages.get(name, (0,))) for name, _ in model.named_parameters(remove_duplicate=False)}
    copies = [(stage, name) for name, own in held.items() for stage in own[1:]]
    owner = {name: own[0] for name, own in held.items()}
    return Reference(model, owner=owner, recipe=recipe, copies=copies, by_use=bool(copies))


def _updated(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    stages: Stages,
    gradients: Mapping[Site, Gradient],
    *,
    norm: float | None = None,
    off: float = 0.0,
) -> Mapping[Site, Tensor]:
    """What the optimizer makes of the parameters with these gradients, as ``Updates`` has it; both stay as they are."""
    own, stepping = copied((model, optimizer))
    reference = _reference(own, replace(recipe, optimizer=lambda _: settings_off(stepping, off)), stages)
    return reference.step(gradients, clip_factor(reference.norm(gradients) if norm is None else norm, recipe.max_norm))


def _floors(
    reference: Reference, step: Pending, *, moves: bool, updated: Updates | None
) -> tuple[RecordedFloors, Mapping[str, str]]:
    """What rounding does to every number of ``step``, and as what products of fp32 are rounded.

    ``reference`` is as it was before.
    """
    again = reference.of(copied(reference.model)).contributing(step.batches[::-1])
    check_repeated(step.expected.losses, [one.loss for one in again][::-1])
    floors = Floors(reference, [step], updated=updated)
    found = RecordedFloors.measured(step.expected, floors, moved=moves, updates=updated is not None)
    return found, floors.products


def check_repeated(losses: Sequence[float], others: Sequence[float]) -> None:
    """Raise ``RecordError`` unless the ``others``, of the same microbatches run again, are the same losses."""
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
