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
from pipeproof.reference.copied import deep_copy
from pipeproof.reference.data import Batch
from pipeproof.reference.model import LossFn, Model
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
    """A reference operation: expected result, expected tensors of a recording at every point, and initial model."""

    number: int
    expected: Expected
    tensors: Mapping[Point, Tensors]
    model: Model


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
        cut = copy.deepcopy(before).train(name != "eval")  # forwards may leave something behind
        tensors: dict[Point, Tensors] = {}
        for m, batch in enumerate(batches):
            tensors |= _pass_through(cut, batch, m, setup.layers, loss_fn, divisor)
        ran = dict.fromkeys(range(setup.stages), every) if observed is None else observed.backwards(number)
        orders = {s: o if sorted(o) == every else every for s, o in ran.items()}
        expected = reference.perform(name, batches, orders=orders, max_norm=setup.max_norm(number))
        played.append(Played(number, expected, tensors, before))
    return played


def _pass_through(
    model: Model, batch: Batch, m: int, layers: Sequence[range], loss_fn: LossFn, divisor: float
) -> dict[Point, Tensors]:
    """Run microbatch ``m`` through ``model`` in stages, and back unless in evaluation: the tensors at every point.

    The graph is cut at a pipeline's boundaries, which on one device does not change a bit.
    """
    inputs, outputs, given = [], [], batch.inputs
    with torch.set_grad_enabled(model.training):
        for own in layers:
            inputs.append(tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in given))
            given = model.through(own, inputs[-1])
            outputs.append(given)
        (output,) = given
        loss = loss_fn(output, batch.target)
    found: dict[Point, Tensors] = {}
    received, last = _flow((loss / divisor,), (None,), given), len(layers) - 1
    for stage in reversed(range(len(layers))):
        there: dict[str, Tensors] = {GIVEN: inputs[stage], USED: inputs[stage], MADE: outputs[stage]}
        there |= {OUTPUT: outputs[stage]} if stage < last else {LOSS: (loss,)}
        if model.training:
            flowed, handed_on = (_flow(outputs[stage], received, to) for to in (outputs[stage], inputs[stage]))
            from_next = {RECEIVED: received, LATE: received} if stage < last else {}
            there |= {**from_next, KEPT: inputs[stage], HANDED_ON: handed_on, FLOWED: flowed}
            received = handed_on
        plain = {where: tuple(None if one is None else one.detach() for one in each) for where, each in there.items()}
        found = {Point(stage, m, where): each for where, each in plain.items()} | found
    return found


def _flow(outputs: Sequence[Tensor], received: Tensors, to: Sequence[Tensor]) -> Tensors:
    """Gradients at ``to`` from those that outputs ``received``, None without flow. A loss needs none."""
    pairs = [
        pair
        for pair in zip(outputs, received, strict=True)
        if pair[0].requires_grad and (pair[1] is not None or not pair[0].dim())
    ]
    wanted = [tensor for tensor in to if tensor.requires_grad]
    if not pairs or not wanted:
        return (None,) * len(to)
    ends, starts = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(ends, wanted, starts, retain_graph=True, allow_unused=True))
    return tuple(next(found) if tensor.requires_grad else None for tensor in to)


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
