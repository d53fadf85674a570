"""How a run was set up, and the reference's side of it: every operation as one device does it."""

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
    """What the ranks were told to do.

    ``layers`` of each stage, ``owner``: the stage of every parameter name, ``placement``: the rank of every stage.
    ``build`` makes the model with its first weights; ``batches`` and ``max_norm`` are asked for the number of an
    operation of ``plan``.
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
    """One operation as the reference did it: what it must give, its boundary tensors, and the model as it began."""

    number: int
    expected: Expected
    boundaries: tuple[Boundary, ...]
    model: Model

    def tensors(self) -> dict[Point, Tensors]:
        """What a recording must hold at every point."""
        return {
            point: seen for m, one in enumerate(self.boundaries) for point, seen in _points(m, one) if seen is not None
        }


def play(setup: Setup, observed: Observed | None, until: int) -> list[Played]:
    """The reference's operations 0 to ``until``, adding in the orders in which the ranks ran, if somebody saw that."""
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
        seen: dict[str, Tensors | None] = {GIVEN: inputs, USED: inputs, MADE: outputs}
        seen |= {OUTPUT: outputs} if stage < last else {LOSS: (one.loss,)}
        if one.output_gradients:
            received = one.output_gradients[stage] if stage < last else None
            seen |= {RECEIVED: received, KEPT: inputs, LATE: received, HANDED_ON: one.input_gradients[stage]}
            seen[FLOWED] = one.flows[stage]
        found += [(Point(stage, microbatch, where), tensors) for where, tensors in seen.items()]
    return found


def beside_of(setup: Setup, now: Played) -> ModelBeside:
    """The model of one operation as a player of single microbatches."""
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
