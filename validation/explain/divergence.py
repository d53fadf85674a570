"""The first divergence: walk the data from the first stage's input to the last gradient.

A wrong tensor with right inputs is the first; anything after it is consequence.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pipeproof.core.observe.likeness import Label, Likeness
from pipeproof.core.observe.recording import (
    BACKWARD_POINTS,
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
    Recording,
)
from pipeproof.core.tolerance import agrees
from pipeproof.explain.known import Known
from pipeproof.explain.likeness import likeness
from pipeproof.explain.limits import MANY
from pipeproof.pipeline.action import Action, Kind

Tensors = Sequence[Tensor | None]


@dataclass(frozen=True)
class Divergence:
    """A wrong tensor with right inputs.

    ``action``: the rank's own text, at position ``slot`` of its list. ``what``: the likeness of the tensor. ``graph``:
    the microbatch whose forward a backward ran through, if another's. ``turn``: how many actions its stage ran before.
    """

    rank: int
    point: Point
    action: str
    slot: int | None
    what: Likeness
    graph: int | None = None
    turn: int = 0


@dataclass(frozen=True)
class Ground:
    """Reference for a recording: the expected tensors, and all tensors to search for content.

    ``earlier``: the expected tensors of operations before, latest first. ``limit``: the largest relative error of
    rounding.
    """

    expected: Mapping[Point, Tensors]
    earlier: Sequence[Mapping[Point, Tensors]]
    limit: float

    def known(self) -> Known:
        """All tensors that may stand in another's place."""
        return Known(
            (Label(point, ago, number), tensor.detach().cpu())
            for ago, tensors in enumerate((self.expected, *self.earlier))
            for point, members in tensors.items()
            for number, tensor in enumerate(members)
            if tensor is not None
        )


def divergences(
    recording: Recording, ground: Ground, placement: Sequence[int], slots: Mapping[Action, int]
) -> list[Divergence]:
    """The first wrong tensors, in dataflow order; ``slots`` by action.

    With ``ground.limit`` above 0 and no tensor beyond it, return those that differ in bits alone.
    """
    stages = 1 + max(point.stage for point in ground.expected)
    both = [point for point in ground.expected if point in recording.tensors]
    rights = ({point: is_right(recording, ground, point, limit) for point in both} for limit in (ground.limit, 0.0))
    first = next(filter(None, (first_wrong_points(right, stages) for right in rights)), [])
    known = ground.known() if first else Known()
    found = []
    for point in first[:MANY]:
        stage, microbatch, where = point
        graph = [m for m in recording.graphs.get((stage, microbatch), ()) if m != microbatch]
        met = graph[0] if graph and where == FLOWED else None
        if met is not None:
            text = f"in microbatch {met}'s activations, expected microbatch {microbatch}'s"
            what = Likeness("other", Label(point), Label(Point(stage, met, USED)), words=text)
        else:
            observed, expected = recording.tensors[point], ground.expected[point]
            pairs = enumerate(zip(observed, expected, strict=False))
            right = ((k, one, None if other is None else other.detach().cpu()) for k, (one, other) in pairs)
            each = (likeness(one, other, Label(point, number=k), known=known) for k, one, other in right)
            shape = Likeness("shape", forms=(f"{len(observed)} tensors", f"{len(expected)}"))
            what = next((one for one in each if one is not None), shape)
        action = action_at(point, slots)
        slot = slots.get(action)
        found.append(Divergence(placement[stage], point, str(action), slot, what, met, slot or 0))
    return found


def action_at(point: Point, executed: Collection[Action]) -> Action:
    """The action at ``point`` in its rank's own notation: a backward is whole, or split."""
    kinds = [Kind.BACKWARD_WEIGHT] if point.where == LATE else [Kind.BACKWARD, Kind.BACKWARD_INPUT]
    kinds = [Kind.FORWARD] if point.where in FORWARD_POINTS else kinds
    actions = [Action(point.stage, kind, point.microbatch) for kind in kinds]
    return next((one for one in actions if one in executed), actions[0])


def first_wrong_points(right: Mapping[Point, bool], n_stages: int) -> list[Point]:
    """The wrong points whose sources are all ``right``: up the stages forwards, then down backwards."""
    wrong = [point for point, is_right in right.items() if not is_right]
    found = [point for point in wrong if all(right[parent] for parent in _parents(point, n_stages, right))]
    return sorted(found, key=flow_of)


def is_right(recording: Recording, ground: Ground, point: Point, limit: float) -> bool:
    """True if the tensors recorded at ``point`` match the expected ones within a relative error of ``limit``."""
    observed, expected = recording.tensors[point], ground.expected[point]
    if point.where == FLOWED:
        graph = recording.graphs.get((point.stage, point.microbatch), ())
        if any(other != point.microbatch for other in graph):
            return False
        # What is not trained to, no gradient flows into: the module's hooks never fire there.
        expected = expected[: len(observed)] if all(one is None for one in expected[len(observed) :]) else expected
    return len(observed) == len(expected) and all(
        one is other if one is None or other is None else agrees(one, other.detach().cpu(), limit)
        for one, other in zip(observed, expected, strict=True)
    )


def flow_of(point: Point) -> tuple[bool, int, int, int]:
    """Where ``point`` lies along the flow."""
    if point.where in FORWARD_POINTS:
        return (False, point.stage, FORWARD_POINTS.index(point.where), point.microbatch)
    return (True, -point.stage, BACKWARD_POINTS.index(point.where), point.microbatch)


def _parents(point: Point, n_stages: int, known: Mapping[Point, bool]) -> Iterator[Point]:
    """Recorded sources of a point's tensors, across unrecorded points."""
    for parent in _sources_of(point, n_stages):
        if parent in known:
            yield parent
        else:
            yield from _parents(parent, n_stages, known)


def _sources_of(point: Point, n_stages: int) -> Iterator[Point]:
    stage, microbatch, where = point
    same: dict[str, tuple[str, ...]] = {}
    same |= {USED: (GIVEN,), MADE: (USED,), OUTPUT: (MADE,), LOSS: (MADE,), KEPT: (USED,), LATE: (RECEIVED,)}
    same |= {FLOWED: (RECEIVED, KEPT) if stage < n_stages - 1 else (LOSS, KEPT), HANDED_ON: (FLOWED, KEPT)}
    yield from (Point(stage, microbatch, parent) for parent in same.get(where, ()))
    if where == GIVEN and stage:
        yield Point(stage - 1, microbatch, OUTPUT)
    if where == RECEIVED and stage < n_stages - 1:
        yield Point(stage + 1, microbatch, HANDED_ON)
    if where == FLOWED:
        yield Point(stage, microbatch, MADE)
