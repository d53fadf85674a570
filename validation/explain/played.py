"""The setup of a run, and the reference's side: every operation on one device."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

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
from pipeproof.explain.model_beside import ModelBeside
from pipeproof.reference.boundary import Boundary, boundary
from pipeproof.reference.data import Batch
from pipeproof.reference.model import Model
from pipeproof.reference.step import Expected, Loss, Recipe, Reference, objective
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
        return {
            point: observed
            for m, one in enumerate(self.boundaries)
            for point, observed in _points(m, one)
            if observed is not None
        }


def play(setup: Setup, observed: Observed | None, until: int) -> list[Played]:
    """Play the reference's operations 0 to ``until``, adding in the order of the ranks' backwards, if observed."""
    model = setup.build()
    reference = Reference(model, owner=setup.owner, recipe=setup.recipe)
    every = list(range(setup.microbatches))
    played = []
    for number in range(until + 1):
        name, batches = setup.plan[number], setup.batches(number)
        loss_fn, divisor = objective(model, batches, setup.recipe)
        # A copy each for evaluation and for training: forwards may leave something behind.
        before = copy.deepcopy(model)
        cut = copy.deepcopy(before)
        boundaries = tuple(
            boundary(
                cut,
                batch,
                stages=setup.layers,
                loss_fn=loss_fn,
                divisor=divisor,
                training=name != "eval",
            )
            for batch in batches
        )
        ran = dict.fromkeys(range(setup.stages), every) if observed is None else observed.backwards(number)
        orders = {s: o if sorted(o) == every else every for s, o in ran.items()}
        expected = reference.perform(name, batches, orders=orders, max_norm=setup.max_norm(number))
        played.append(Played(number, expected, boundaries, before))
    return played


def _points(microbatch: int, one: Boundary) -> list[tuple[Point, Tensors | None]]:
    last = len(one.inputs) - 1
    found: list[tuple[Point, Tensors | None]] = []
    for stage, (inputs, outputs) in enumerate(zip(one.inputs, one.outputs, strict=True)):
        observed: dict[str, Tensors | None] = {GIVEN: inputs, USED: inputs, MADE: outputs}
        observed |= {OUTPUT: outputs} if stage < last else {LOSS: (one.loss,)}
        if one.output_gradients:
            received = one.output_gradients[stage] if stage < last else None
            observed |= {RECEIVED: received, KEPT: inputs, LATE: received, HANDED_ON: one.input_gradients[stage]}
            observed[FLOWED] = one.flows[stage]
        found += [(Point(stage, microbatch, where), tensors) for where, tensors in observed.items()]
    return found


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
