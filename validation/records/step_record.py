"""Record a training step on one device: a plain loop over the microbatches, for any model."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.contract import DEFAULTS, Contract
from pipeproof.core.floors import Floors
from pipeproof.core.limits import PRECISIONS
from pipeproof.core.measured import versions
from pipeproof.core.nudged import Nudged
from pipeproof.core.updates import Pending
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
    recipe = recipe_of(contract, loss_fn, len(microbatches))
    with keep_unchanged(model, optimizer, loss_fn, microbatches):
        return OneDevice(model, microbatches, recipe, optimizer).record(floors=floors, moves=floors)


def recipe_of(
    contract: Contract, loss_fn: LossFn, microbatches: int, shares: tuple[tuple[int, ...], ...] = ()
) -> Recipe:
    """Build the recipe for a step of so many ``microbatches`` by ``contract``; ``shares``: each replica's."""
    by, divisor = replace(contract.accumulation or PLAIN, shares=shares), float(contract.loss_divisor or microbatches)
    late = float(contract.loss_scale or 1.0) * (divisor if by.late else 1.0)
    return Recipe(Loss(loss_fn, divisor), contract.max_norm or math.inf, late=late, accumulation=by)


@dataclass(frozen=True)
class OneDevice:
    """A step of ``model`` by ``recipe``, without its optimizer; model and ``optimizer`` stay unchanged.

    stages: by name, the stages of each parameter; a parameter in several is first added up in each.
    """

    model: nn.Module
    microbatches: Pairs
    recipe: Recipe
    optimizer: torch.optim.Optimizer | None = None
    stages: Mapping[str, Collection[int]] = field(default_factory=dict)

    def record(self, *, floors: bool = True, moves: bool = False) -> Record:
        """Record the step; ``floors`` as in ``record_step``.

        moves: also measure the effect of weights one rounding off; a caller with the model may do so on demand.
        """
        if not self.microbatches:
            raise RecordError("microbatches is empty: expected at least one")
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            kind = type(self.model).__name__
            raise RecordError(f"the model, a {kind}, has no parameter to train: nothing could be compared")
        step = self._perform()
        measured, products = self._measure(step, moves=moves) if floors else (None, {})
        digests = {"contents": content_digests(self.microbatches), "floors": measured}
        operation = RecordedOperation.of(step.expected, microbatch_digests(self.microbatches), **digests)
        operation = operation if self.optimizer else replace(operation, parameters={})
        return Record("expected", self._config | ({"products": products} if floors else {}), (operation,))

    def nudged(self) -> Nudged | None:
        """Measure the effect of weights one rounding off on the step; None without a narrow type."""
        step = self._perform()
        return Floors(self._reference(deep_copy(self.model), self.recipe), [step]).moved

    def _perform(self) -> Pending:
        """Run the step on a copy."""
        own, stepping = deep_copy((self.model, self.optimizer))
        batches = [Batch.of(*pair).to(str(next(own.parameters()).device)) for pair in self.microbatches]
        recipe = replace(self.recipe, optimizer=lambda some: stepping or sgd(some))
        orders = dict.fromkeys({0, *(one for held in self.stages.values() for one in held)}, range(len(batches)))
        return Pending(self._reference(own, recipe).perform("train", batches, orders=orders), batches, orders)

    def _reference(self, model: nn.Module, recipe: Recipe) -> Reference:
        """Wrap ``model`` with its stages; a single stage if unknown."""
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        held = {name: sorted(self.stages.get(name, (0,))) for name in names}
        copies = [(stage, name) for name, own in held.items() for stage in own[1:]]
        owner = {name: own[0] for name, own in held.items()}
        return Reference(model, owner=owner, recipe=recipe, copies=copies, by_use=bool(copies))

    def _update(
        self, gradients: Mapping[Site, Gradient], *, norm: float | None = None, off: float = 0.0
    ) -> Mapping[Site, Tensor]:
        """Update parameters by the optimizer with these gradients."""
        own, stepping = deep_copy((self.model, self.optimizer))
        assert stepping is not None, "an update is asked of a step with an optimizer"
        reference = self._reference(own, replace(self.recipe, optimizer=lambda _: settings_off(stepping, off)))
        norm = reference.norm(gradients) if norm is None else norm
        return reference.step(gradients, clip_factor(norm, self.recipe.max_norm))

    def _measure(self, step: Pending, *, moves: bool) -> tuple[RecordedFloors, Mapping[str, str]]:
        """Measure rounding of every number in ``step``, and of fp32 products."""
        reference = self._reference(deep_copy(self.model), self.recipe)
        again = reference.of(deep_copy(reference.model)).contributing(step.batches[::-1])
        check_repeated(step.expected.losses, [one.loss for one in again][::-1])
        floors = Floors(reference, [step], updated=self._update if self.optimizer else None)
        found = RecordedFloors.measure(step.expected, floors, moved=moves, updates=self.optimizer is not None)
        return found, floors.products

    @property
    def _config(self) -> dict[str, object]:
        assert isinstance(self.recipe.loss, Loss), "a loss of one's own"
        dtypes = {_NAMES.get(parameter.dtype, str(parameter.dtype)) for parameter in self.model.parameters()}
        return {
            "model": type(self.model).__name__,
            "microbatches": len(self.microbatches),
            "loss_divisor": self.recipe.loss.divisor,
            "max_norm": self.recipe.max_norm if self.recipe.max_norm < math.inf else None,
            "dtype": "+".join(sorted(dtypes)),
            **versions(),
        }


def check_repeated(losses: Sequence[float], others: Sequence[float]) -> None:
    """Raise ``RecordError`` unless a rerun repeats the losses."""
    for number, (loss, other) in enumerate(zip(losses, others, strict=True)):
        if loss != other and (loss == loss or other == other):
            raise RecordError(
                f"the model does not give the same loss twice: microbatch {number} {loss:.9g}, then {other:.9g}; "
                "seed what it draws from the microbatch, or switch it off"
            )


def write_record(record: Record, path: str) -> None:
    """Write ``record`` to a file, whole or not at all; only rank 0 of a launcher does."""
    with OutputFile(path) as file:
        write(record, file)
