"""What a verdict rests on, in numbers: every comparison that was measured, and what each action took and made."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

from pipeproof.judging.cause import Cell
from pipeproof.observers.likeness import Likeness
from pipeproof.observers.observed import UNKNOWN_MICROBATCH, Crossing, Observed
from pipeproof.observers.recording import (
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
from pipeproof.pipeline.action import COMPUTE, Action, Kind

MADE_THERE = (MADE, OUTPUT, LOSS, HANDED_ON)  # points at which an action made the tensor; it took the others


@dataclass(frozen=True)
class Compared:
    """Two numbers, or two tensors, that were compared: where, how far apart they are, and what rounding allows.

    ``error`` is relative, and 0 where every bit agrees: then nobody measured ``floor``, which is what rounding alone
    did, and ``limit``, which is what it allows. ``found`` and ``due`` are numbers; of tensors they are None.
    """

    law: str
    operation: int
    outcome: str
    rank: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    parameter: str | None = None
    error: float = 0.0
    floor: float | None = None
    limit: float | None = None
    found: float | None = None
    due: float | None = None


@dataclass(frozen=True)
class Sight:
    """A tensor that an action took or made, beside the one that is due.

    ``agrees``: whether it is that; None where it was not compared. ``seen`` says what it is instead. ``error`` is
    relative, None where no number says it, and ``limit`` is what rounding allows. ``really``: the action that made what
    it really is; ``due``: the one that should have.
    """

    what: str
    made: bool
    agrees: bool | None
    seen: str = ""
    error: float | None = None
    limit: float | None = None
    really: str = ""
    due: str = ""


@dataclass(frozen=True)
class Done:
    """One action as a rank did it; ``sights`` are empty where nobody looked."""

    stage: int
    kind: Kind
    microbatch: int | None
    sights: tuple[Sight, ...] = ()

    @property
    def action(self) -> str:
        """As it is written."""
        return f"{self.stage}{self.kind.value}{'?' if self.microbatch is None else self.microbatch}"


@dataclass(frozen=True)
class Ran:
    """One operation as the ranks did it: each one's actions in their order, and the rank of every stage."""

    operation: int
    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Done, ...], ...]

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON: every rank's actions, and the tensors of those that were looked at."""
        seen = [{"action": done.action, **_told(one)} for row in self.ranks for done in row for one in done.sights]
        return {**vars(self), "ranks": [[done.action for done in row] for row in self.ranks], "tensors": seen}


@dataclass(frozen=True)
class Weights:
    """One parameter's coefficients, by microbatch; ``seen`` says what it is where they do not hold for it."""

    parameter: str
    cells: tuple[Cell, ...]
    seen: str = ""


@dataclass(frozen=True)
class Measured:
    """All of it; a part that this kind of run does not have, or that nobody recorded, is empty.

    ``weights`` are those of the parameters of ``stage``, where the fault is.
    """

    compared: tuple[Compared, ...] = ()
    ran: Ran | None = None
    stage: int | None = None
    weights: tuple[Weights, ...] = ()

    def of(self, law: str) -> list[Compared]:
        """What was compared under ``law``."""
        return [one for one in self.compared if one.law == law]

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON; what does not apply is left out."""
        ran = None if self.ran is None else self.ran.as_dict()
        weights = [asdict(one) for one in self.weights]
        return {"compared": [*map(_told, self.compared)], "ran": ran, "stage": self.stage, "weights": weights}


def _told(one: Compared | Sight) -> dict[str, object]:
    return {name: value for name, value in vars(one).items() if value not in (None, "")}


def ran_of(observed: Observed, number: int, sights: Mapping[Action, Sequence[Sight]] | None = None) -> Ran | None:
    """Operation ``number`` as it was observed; None where nobody saw what ran.

    ``sights``: the tensors of actions, where they were recorded. Else they are those that crossed the boundaries.
    """
    if not any(rank[number].executed for rank in observed.ranks):
        return None
    crossings = observed.crossings(number)
    if sights is None:
        sights = _by_action(crossings)
    ranks: list[list[Done]] = [[] for _ in observed.ranks]
    where = {crossing.action: crossing.rank for crossing in crossings if crossing.rank is not None}
    for rank, row in enumerate(observed.ranks):
        for action in (action for action in row[number].executed if action.kind in COMPUTE):
            ranks[where.get(action, rank)].append(_of_action(action, sights))
    schedule = observed.schedule
    return Ran(number + 1, schedule.microbatches, schedule.placement, tuple(map(tuple, ranks)))


def _of_action(action: Action, sights: Mapping[Action, Sequence[Sight]]) -> Done:
    stage, kind, microbatch = action
    known = None if microbatch == UNKNOWN_MICROBATCH else microbatch
    return Done(stage, kind, known, tuple(sights.get(action, ())))


def _by_action(crossings: Sequence[Crossing]) -> dict[Action, list[Sight]]:
    found: dict[Action, list[Sight]] = {}
    for crossing in crossings:
        found.setdefault(crossing.action, []).append(_of_crossing(crossing))
    return found


def _of_crossing(crossing: Crossing) -> Sight:
    point = Point(crossing.action.stage, crossing.action.microbatch, crossing.where)
    agrees = crossing.same if crossing.judged or crossing.same else None
    error = 0.0 if crossing.exact else crossing.error
    return sight(point, crossing.what, agrees, crossing.really, error=error, limit=crossing.limit)


def sight(
    point: Point,
    what: str,
    agrees: bool | None,
    really: Likeness | None,
    *,
    error: float | None = None,
    limit: float | None = None,
) -> Sight:
    """The tensor at ``point``; ``really`` is what it is instead of what is due there."""
    label = really.label if really is not None and really.kind == "other" else None  # in place of it, not mixed with it
    came = due = ""
    if label is not None and label.point != point and not (label.ago or label.name):
        # A backward that ran back through another's activations lacks its own: its output gradient may be right.
        through = point.where == FLOWED and label.point.where in FORWARD_POINTS
        came = _maker(label.point)
        due = _maker(label.point._replace(microbatch=point.microbatch) if through else point) if came else ""
    seen = "" if really is None else really.text
    return Sight(what, point.where in MADE_THERE, agrees, seen, error, limit, came, due)


def _maker(point: Point) -> str:
    """The action that makes what passes at ``point``: what is taken there, the stage beside it made; empty: none."""
    forward = point.where in (*FORWARD_POINTS, KEPT)
    beside = {GIVEN: -1, USED: -1, KEPT: -1, RECEIVED: 1, FLOWED: 1, LATE: 1}.get(point.where, 0)
    stage = point.stage + beside
    return f"{stage}{'F' if forward else 'B'}{point.microbatch}" if stage >= 0 <= point.microbatch else ""


@cache
def versions() -> Mapping[str, str]:
    """What computed, by name."""
    return {"pipeproof": _version("pipeproof"), "torch": _version("torch"), "python": python_version()}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"
