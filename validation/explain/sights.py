"""Numbers that an explanation adds to a verdict: each recorded tensor, and each parameter's coefficients."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeproof.core.cause import Cell
from pipeproof.core.measured import Measured, Sight, Weights
from pipeproof.core.measuring import sight, trace_of
from pipeproof.core.observe.likeness import Likeness
from pipeproof.core.observe.recording import FLOWED, GIVEN, HANDED_ON, LATE, LOSS, MADE, RECEIVED
from pipeproof.core.tolerance import error
from pipeproof.core.verdict import Verdict
from pipeproof.explain.divergence import action_at, is_right
from pipeproof.explain.evidence import Evidence
from pipeproof.pipeline.action import Action

# Kept even if right; at other points only wrong tensors are kept.
_ALWAYS = (GIVEN, MADE, LOSS, RECEIVED, FLOWED, HANDED_ON, LATE)


def measure(evidence: Evidence, found: Verdict) -> Measured:
    """Numbers for the verdict, given its cause ``found``: coefficients for the faulty stage, and recorded tensors."""
    numbers = found.measured
    if found.cells is not None and evidence.attribution is not None:
        wrong = [stage for stage, row in enumerate(found.cells.rows) if not all(cell.right for cell in row)]
        at = next((cause.stage for cause in found.causes if cause.stage is not None), wrong[-1])
        explained, row = evidence.attribution.stages[at], found.cells.rows[at]
        odd = {one.parameter: one for one in explained.odd}
        weights = [Weights(name, _of(one, row), one.text) for name, one in odd.items()]
        weights += [Weights(name, row) for name in explained.names if name not in odd]
        numbers = replace(numbers, stage=at, weights=tuple(weights))
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
    found: dict[Action, list[Sight]] = {}
    for point, expected in ground.expected.items():
        observed = recording.tensors.get(point)
        if observed is None or not any(one is not None for one in (*observed, *expected)):
            continue
        pairs = zip(observed, expected, strict=False)
        errors = [error(one, other.cpu()) for one, other in pairs if one is not None and other is not None]
        right = point not in first and is_right(recording, ground, point, ground.limit)
        what = first[point].what if point in first else None
        one = sight(point, point.where, right, what, error=max(errors, default=None), limit=ground.limit)
        if point.where not in _ALWAYS and one.agrees:
            continue
        found.setdefault(action_at(point, executed), []).append(one)
    return {action: sorted(sights, key=lambda one: (one.made, one.what)) for action, sights in found.items()}


def _of(odd: Likeness, row: tuple[Cell, ...]) -> tuple[Cell, ...]:
    """Coefficients for a single parameter, from its likeness."""
    if odd.kind == "right":
        return tuple(Cell(1.0) for _ in row)
    if odd.kind in ("zero", "missing"):
        return tuple(Cell(0.0) for _ in row)
    counts = dict(odd.counts)
    return tuple(Cell(counts.get(m, 0.0) if counts else None) for m in range(len(row)))
