"""The reference as a player: every operation of a run on one device, or one microbatch, also with a fault."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeproof.core.observe.observed import Observed
from pipeproof.core.observe.recording import (
    FLOWED,
    GIVEN,
    HANDED_ON,
    KEPT,
    LATE,
    LOSS,
    MADE,
    OUTPUT,
    RECEIVED,
    USED,
    Point,
)
from pipeproof.core.observe.sketch import Sketch
from pipeproof.reference.boundary import Boundary, boundary
from pipeproof.reference.copied import deep_copy
from pipeproof.reference.data import Batch
from pipeproof.reference.model import Model
from pipeproof.reference.outputs import Place, module_of, order_of_use, outputs_noted
from pipeproof.reference.step import Contribution, Expected, Loss, Recipe, Reference, objective
from pipeproof.reference.traced import Traced


@dataclass(frozen=True)
class Setup:
    """Setup for the ranks.

    ``layers`` of each stage; ``owner``: the stage of every parameter name; ``placement``: the rank of every stage.
    ``build`` makes the model with its first weights; ``batches`` and ``max_norm`` take the number of an operation of
    ``plan``.
    """

    plan: tuple[str, ...]
    layers: tuple[range, ...]
    owner: Mapping[str, int]
    placement: Sequence[int]
    ranks: int
    microbatches: int
    dtype: torch.dtype
    recipe: Recipe
    build: Callable[[], Model]
    batches: Callable[[int], list[Batch]]
    max_norm: Callable[[int], float]

    @property
    def stages(self) -> int:
        return len(self.layers)


Tensors = Sequence[Tensor | None]


@dataclass(frozen=True)
class Played:
    """A reference operation: expected result, boundary tensors, and initial model."""

    number: int
    expected: Expected
    boundaries: tuple[Boundary, ...]
    model: Model

    def tensors(self) -> dict[Point, Tensors]:
        """Expected tensors of a recording at every point."""
        found: dict[Point, Tensors] = {}
        for m, one in enumerate(self.boundaries):
            last = len(one.inputs) - 1
            for stage, (inputs, outputs) in enumerate(zip(one.inputs, one.outputs, strict=True)):
                there: dict[str, Tensors | None] = {GIVEN: inputs, USED: inputs, MADE: outputs}
                there |= {OUTPUT: outputs} if stage < last else {LOSS: (one.loss,)}
                if one.output_gradients:
                    received = one.output_gradients[stage] if stage < last else None
                    there |= {RECEIVED: received, KEPT: inputs, LATE: received, HANDED_ON: one.input_gradients[stage]}
                    there[FLOWED] = one.flows[stage]
                found |= {Point(stage, m, where): values for where, values in there.items() if values is not None}
        return found


def play(setup: Setup, observed: Observed | None, until: int) -> list[Played]:
    """Play the reference's operations 0 to ``until``, adding in the order of the ranks' backwards, if observed."""
    model = setup.build()
    reference = Reference(model, owner=setup.owner, recipe=setup.recipe)
    every = list(range(setup.microbatches))
    played = []
    for number in range(until + 1):
        name, batches = setup.plan[number], setup.batches(number)
        loss_fn, divisor = objective(model, batches, setup.recipe)
        before = copy.deepcopy(model)
        cut = copy.deepcopy(before)  # forwards may leave something behind
        boundaries = tuple(
            boundary(cut, batch, stages=setup.layers, loss_fn=loss_fn, divisor=divisor, training=name != "eval")
            for batch in batches
        )
        ran = dict.fromkeys(range(setup.stages), every) if observed is None else observed.backwards(number)
        orders = {s: o if sorted(o) == every else every for s, o in ran.items()}
        expected = reference.perform(name, batches, orders=orders, max_norm=setup.max_norm(number))
        played.append(Played(number, expected, boundaries, before))
    return played


Planted = Callable[[nn.Module], AbstractContextManager[Any]]  # while it is open, something is otherwise in the model

_NEVER_RAN = (RuntimeError, TypeError, ValueError, IndexError)  # modules that raise these do not take such tensors


@dataclass(frozen=True)
class ModelBeside:
    """A model on one device beside a step, with the step's initial weights and microbatches.

    ``traced`` is the model cut into stages. ``lacks``: whether the reference is known to compute no such tensor for a
    microbatch, nor its sources.
    """

    reference: Reference
    model: nn.Module
    batches: Sequence[Batch]
    loss: Loss
    traced: Callable[[], Traced]
    lacks: Callable[[int, Sketch], bool] = field(default=lambda microbatch, observed: False)
    _ends: dict[int, Sequence[Place]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def play(self, batch: Batch, planted: Planted = nullcontext) -> Contribution | None:
        """Run ``batch``; sum gradients over tied copies; None if the model raises."""
        try:
            with planted(self._again.model):
                (made,) = self._again.contributing([batch])
        except _NEVER_RAN:
            return None
        return replace(made, gradients=self._again.total(made.gradients))

    def loss_of(self, batch: Batch, planted: Planted = nullcontext) -> float | None:
        """Compute the loss for ``batch``; None if the model raises."""
        try:
            with planted(self._again.model):
                ((loss, _),) = self._again.losses([batch])
        except _NEVER_RAN:
            return None
        return loss.item()

    def loss_with(self, microbatch: int, target: Tensor) -> float | None:
        """Compute a microbatch's loss with another target; None if it does not fit, or the model raises."""
        own = self.batches[microbatch]
        fits = own.target.numel() and own.target.shape == target.shape
        return self.loss_of(replace(own, target=target)) if fits else None

    def ends(self, stage: int) -> Sequence[Place]:
        """List the places that end ``stage``, in module output order; empty if unknown."""
        if stage not in self._ends:
            inner = stage < self._traced.stages - 1
            self._ends[stage] = sorted(self._traced.end(stage), key=_in_order) if inner else self.places[-1:]
        return self._ends[stage]

    def later(self, stage: int) -> Collection[str]:
        """Modules held only by stages after ``stage``."""
        return self._traced.later(stage)

    @cached_property
    def modules(self) -> Mapping[str, int]:
        """The order in which the model's modules end."""
        return order_of_use(deep_copy(self.model), self.batches[0].inputs)

    @cached_property
    def places(self) -> Sequence[Place]:
        """Output places by module."""
        model, found = deep_copy(self.model), list[Place]()
        with outputs_noted(model, lambda place, tensor: found.append(place)):
            model(*self.batches[0].inputs)
        return found

    @cached_property
    def plain(self) -> bool:
        """True if the model gives the same in evaluation: it draws no numbers and ignores its mode."""
        model, inputs = deep_copy(self.model), self.batches[0].inputs
        with torch.no_grad():
            made = [tree_leaves(mode(*inputs)) for mode in (model.train(), deep_copy(model).eval())]
        pairs = [pair for pair in zip(*made, strict=True) if isinstance(pair[0], Tensor)]
        return all(torch.equal(*pair) for pair in pairs)

    @property
    def draws(self) -> bool:
        """True if evaluation differs without statistics of the batch."""
        return not self.plain and not any(True for _ in self.model.buffers())

    @cached_property
    def _traced(self) -> Traced:
        return self.traced()

    @cached_property
    def _again(self) -> Reference:
        return self.reference.of(deep_copy(self.model))


def _in_order(place: Place) -> tuple[str, int]:
    """Sort a module's outputs by number."""
    return module_of(place), int(place.split()[1])


def model_beside(setup: Setup, now: Played) -> ModelBeside:
    """Build a player for single microbatches in an operation."""
    batches = setup.batches(now.number)
    loss = Loss(*objective(now.model, batches, setup.recipe))
    reference = Reference(now.model, owner=setup.owner, recipe=replace(setup.recipe, loss=loss))
    held = [(stage, name) for name, stage in setup.owner.items()]
    losses = now.expected.losses
    return ModelBeside(
        reference,
        now.model,
        batches,
        loss,
        traced=lambda: Traced(now.model, held=held, batches=batches, loss=loss, losses=losses, ends={}),
    )
