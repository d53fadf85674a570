"""Numbers that an explanation adds to a verdict: each recorded tensor, and each parameter's coefficients."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from pipeproof.core.cause import Cell
from pipeproof.core.measured import Measured, Sight, Weights
from pipeproof.core.measuring import sight, trace_of
from pipeproof.core.observe.likeness import Likeness
from pipeproof.core.observe.recording import (
    FLOWED,
    FORWARD_POINTS,
    GIVEN,
    HANDED_ON,
    LATE,
    LOSS,
    MADE,
    RECEIVED,
    Point,
    Recording,
)
from pipeproof.core.tolerance import error
from pipeproof.core.verdict import Verdict
from pipeproof.explain.divergence import Divergence, Ground, is_right
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.explanation import Explanation
from pipeproof.pipeline.action import Action, Kind

_ALWAYS = (
    GIVEN,
    MADE,
    LOSS,
    RECEIVED,
    FLOWED,
    HANDED_ON,
    LATE,
)  # kept even if right; at other points only wrong tensors are kept
_UNKNOWN = Cell(None)


def measure(evidence: Evidence, found: Verdict) -> Measured:
    """Numbers for the verdict, given its cause ``found``."""
    numbers = _coefficients(evidence, found)
    if evidence.recording is None or evidence.run is None:
        return numbers
    number = evidence.diverged if evidence.divergences else evidence.number
    return replace(numbers, ran=trace_of(evidence.run, number, _sights(evidence, number)))


def _sights(evidence: Evidence, number: int) -> Mapping[Action, Sequence[Sight]]:
    recording = evidence.recording_of(number)
    if recording is None:
        return {}
    ground, first = evidence.ground(number), {one.point: one for one in evidence.divergences}
    executed = {action for rank in evidence.observed.ranks for action in rank[number].executed}
    observed: dict[Action, list[Sight]] = {}
    for point in (point for point in ground.expected if any(_there(point, recording, ground))):
        one = _sight(point, recording, ground, first.get(point))
        if point.where in _ALWAYS or not one.agrees:
            observed.setdefault(_action(point, executed), []).append(one)
    return {action: sorted(sights, key=lambda one: (one.made, one.what)) for action, sights in observed.items()}


def _there(point: Point, recording: Recording, ground: Ground) -> list[bool]:
    """Tell presence for recorded and expected tensors at ``point``."""
    observed = recording.tensors.get(point)
    return [] if observed is None else [one is not None for one in (*observed, *ground.expected[point])]


def _action(point: Point, executed: set[Action]) -> Action:
    """The action at ``point``, a backward in the rank's own notation."""
    if point.where in FORWARD_POINTS:
        return Action(point.stage, Kind.FORWARD, point.microbatch)
    kinds = [Kind.BACKWARD_WEIGHT] if point.where == LATE else [Kind.BACKWARD, Kind.BACKWARD_INPUT]
    actions = [Action(point.stage, kind, point.microbatch) for kind in kinds]
    return next((action for action in actions if action in executed), actions[0])


def _sight(point: Point, recording: Recording, ground: Ground, first: Divergence | None) -> Sight:
    right = first is None and is_right(recording, ground, point, ground.limit)
    size = _error(recording.tensors[point], ground.expected[point])
    likeness = None if first is None else first.what
    return sight(point, point.where, right, likeness, error=size, limit=ground.limit)


def _error(observed: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float | None:
    """The largest tensor error at a place; None without pairs."""
    pairs = [
        (one, other.cpu())
        for one, other in zip(observed, expected, strict=False)
        if one is not None and other is not None
    ]
    return max((error(one, other) for one, other in pairs), default=None)


def _coefficients(evidence: Evidence, found: Verdict) -> Measured:
    """Coefficients by parameter for the faulty stage."""
    if found.cells is None or evidence.attribution is None:
        return found.measured
    wrong = [stage for stage, row in enumerate(found.cells.rows) if not all(cell.right for cell in row)]
    at = next((cause.stage for cause in found.causes if cause.stage is not None), wrong[-1])
    explained, row = evidence.attribution.stages[at], found.cells.rows[at]
    return replace(found.measured, stage=at, weights=tuple(_weights(explained, row)))


def _weights(explained: Explanation, row: tuple[Cell, ...]) -> list[Weights]:
    odd = {one.parameter: one for one in explained.odd}
    held = [Weights(name, row) for name in explained.names if name not in odd]
    return [*(Weights(name, _of(one, row), one.text) for name, one in odd.items()), *held]


def _of(odd: Likeness, row: tuple[Cell, ...]) -> tuple[Cell, ...]:
    """Coefficients for a single parameter, from its likeness."""
    if odd.kind == "right":
        return tuple(Cell(1.0) for _ in row)
    if odd.kind in ("zero", "missing"):
        return tuple(Cell(0.0) for _ in row)
    counts = dict(odd.counts)
    return tuple(Cell(counts.get(m, 0.0)) if counts else _UNKNOWN for m in range(len(row)))
