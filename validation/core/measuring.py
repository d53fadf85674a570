"""Collect a verdict's numbers: executed actions, and measured floors."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeproof.core.comparison import Allowed, exact
from pipeproof.core.floors import Floors
from pipeproof.core.measured import Done, Ran, Sight
from pipeproof.core.observe.likeness import Likeness
from pipeproof.core.observe.observed import UNKNOWN_MICROBATCH, Observed
from pipeproof.core.observe.recording import (
    FLOWED,
    FORWARD_POINTS,
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
from pipeproof.core.tolerance import Floor
from pipeproof.pipeline.action import COMPUTE, Action
from pipeproof.reference.step import Site

MADE_THERE = (MADE, OUTPUT, LOSS, HANDED_ON)  # points at which the action made the tensor; it took all others


def trace_of(observed: Observed, number: int, sights: Mapping[Action, Sequence[Sight]] | None = None) -> Ran | None:
    """Return operation ``number`` as observed. None if no action was observed.

    sights: recorded tensors by action; default: tensors that crossed boundaries.
    """
    if not any(rank[number].executed for rank in observed.ranks):
        return None
    crossings = observed.crossings(number)
    if sights is None:
        sights = found = defaultdict[Action, list[Sight]](list)
        for one in crossings:
            point = Point(one.action.stage, one.action.microbatch, one.where)
            agrees, error = one.same if one.judged or one.same else None, 0.0 if one.exact else one.error
            found[one.action].append(sight(point, one.what, agrees, one.really, error=error, limit=one.limit))
    ranks: list[list[Done]] = [[] for _ in observed.ranks]
    where = {crossing.action: crossing.rank for crossing in crossings if crossing.rank is not None}
    for rank, row in enumerate(observed.ranks):
        for action in (action for action in row[number].executed if action.kind in COMPUTE):
            stage, kind, microbatch = action
            known = None if microbatch == UNKNOWN_MICROBATCH else microbatch
            ranks[where.get(action, rank)].append(Done(stage, kind, known, tuple(sights.get(action, ()))))
    schedule = observed.schedule
    count = observed.counts[number] if observed.counts else schedule.microbatches
    return Ran(number + 1, count, schedule.placement, tuple(map(tuple, ranks)))


def sight(
    point: Point,
    what: str,
    agrees: bool | None,
    really: Likeness | None,
    *,
    error: float | None = None,
    limit: float | None = None,
) -> Sight:
    """Describe the tensor at ``point``. ``really``: what arrived instead."""
    label = really.label if really is not None and really.kind == "other" else None  # replaced, not mixed
    came = expected = ""
    if label is not None and label.point != point and not (label.ago or label.name):
        # A backward through another microbatch's activations lacks its own; its output gradient may be right.
        through = point.where == FLOWED and label.point.where in FORWARD_POINTS
        came = _maker(label.point)
        expected = _maker(label.point._replace(microbatch=point.microbatch) if through else point) if came else ""
    observed = "" if really is None else really.text
    return Sight(what, point.where in MADE_THERE, agrees, observed, error, limit, came, expected)


def _maker(point: Point) -> str:
    """Return the action that makes a point's tensor, on this or a neighbouring stage; empty if none does."""
    forward = point.where in (*FORWARD_POINTS, KEPT)
    beside = {GIVEN: -1, USED: -1, KEPT: -1, RECEIVED: 1, FLOWED: 1, LATE: 1}.get(point.where, 0)
    stage = point.stage + beside
    return f"{stage}{'F' if forward else 'B'}{point.microbatch}" if stage >= 0 <= point.microbatch else ""


def is_wider(observed: Tensor, expected: Tensor) -> bool:
    """True if ``observed`` has a wider type than ``expected``."""
    alike = observed.is_floating_point() and expected.is_floating_point() and observed.shape == expected.shape
    return alike and torch.finfo(observed.dtype).eps < torch.finfo(expected.dtype).eps


@dataclass(frozen=True)
class MeasuredFloors(Allowed):
    """Rounding allowances for a comparison, from a training step's floors.

    wide: gradients summed in a wider type.
    """

    floors: Floors
    sites: Mapping[str, Site]
    wide: Mapping[str, Tensor]

    def loss(self, microbatch: int) -> Floor:
        return self.floors.loss(microbatch)

    def total(self) -> Floor:
        return self.floors.total()

    def norm(self) -> Floor:
        return self.floors.norm()

    def gradient(self, name: str) -> Floor:
        return exact(self.wide[name]) if name in self.wide else self.floors.gradient_by_microbatch(self.sites[name])

    def update(self, name: str) -> Floor:
        return exact(self.wide[name]) if name in self.wide else self.floors.update(self.sites[name])
