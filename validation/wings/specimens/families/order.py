"""Faults of order: changed programs, refused by a static law before they run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pipeproof.own.case import Case
from pipeproof.own.faults import Reorder
from pipeproof.pipeline.action import COMPUTE, GIVES_WEIGHT_GRADIENT, RECEIVES, SENDS, Action, Kind
from pipeproof.pipeline.columns import Columns
from pipeproof.pipeline.deadlock import deadlocks
from pipeproof.pipeline.program import Program, lower
from pipeproof.pipeline.program_laws import violations
from pipeproof.pipeline.transports import Transport
from pipeproof.wings.specimens.specimen import ANYTHING, Entry, Needs

_Row = Sequence[Action]
_GIVES_INPUT_GRADIENT = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})


def change_rows(program: Program, change: Callable[[int, _Row], _Row]) -> Program:
    """Change every rank's row in ``program``; the schedule follows the new rows."""
    rows = [tuple(change(rank, row)) for rank, row in enumerate(program.ranks)]
    compute = tuple(tuple(action for action in row if action.kind in COMPUTE) for row in rows)
    return Program(replace(program.schedule, ranks=compute, overlaps=()), Columns.of(rows))


def exchange(program: Program, one: Action, other: Action) -> Program:
    """``program`` with two actions in each other's places."""
    places = {one: other, other: one}
    return change_rows(program, lambda rank, row: [places.get(action, action) for action in row])


def other_of_two(microbatch: int) -> int:
    """Microbatch 1 for 0, and 0 for 1."""
    return {0: 1, 1: 0}.get(microbatch, microbatch)


def hangs(program: Program) -> bool:
    """Whether ranks wait for each other whatever the transport."""
    return deadlocks(program)[Transport.UNLIMITED] is not None


def broken_laws(program: Program) -> tuple[str, ...]:
    """Return the static laws broken by ``program``, each once."""
    return tuple(dict.fromkeys(violation.law for violation in violations(program)))


def _on(rank: int, change: Callable[[_Row], _Row]) -> Reorder:
    """Change one rank's row; negative ranks count from the last."""

    def reorder(program: Program) -> Program:
        return change_rows(program, lambda r, row: change(row) if r == rank % len(program.ranks) else row)

    return reorder


def _first(row: _Row, kinds: frozenset[Kind]) -> int:
    return next(slot for slot, action in enumerate(row) if action.kind in kinds)


def _last(row: _Row, kinds: frozenset[Kind]) -> int:
    return max(slot for slot, action in enumerate(row) if action.kind in kinds)


def _drop(row: _Row, slot: int) -> _Row:
    return [*row[:slot], *row[slot + 1 :]]


def _put(row: _Row, slot: int, to: int) -> _Row:
    """Move the action of ``slot`` to another place."""
    rest = _drop(row, slot)
    return [*rest[:to], row[slot], *rest[to:]]


def _weight_first(row: _Row) -> _Row:
    slot = _first(row, frozenset({Kind.BACKWARD_WEIGHT}))
    return _put(row, slot, row.index(row[slot]._replace(kind=Kind.BACKWARD_INPUT)))


def _beyond(row: _Row) -> _Row:
    """Add a forward to warm-up beyond the number of microbatches."""
    slot = _last(row, frozenset({Kind.FORWARD}))
    return [*row[: slot + 1], row[slot]._replace(microbatch=row[slot].microbatch + 1), *row[slot + 1 :]]


def _cross_sends(program: Program) -> Program:
    """Delay the first of two messages to the last stage until after the second."""
    stage = program.schedule.n_stages - 2
    one, other = (Action(stage, Kind.SEND_F, m) for m in (0, 1))

    return change_rows(program, lambda rank, row: _put(row, row.index(one), row.index(other)) if other in row else row)


def _renumber_last(program: Program) -> Program:
    """Exchange microbatches 0 and 1 on the last rank."""
    rank = program.schedule.placement[-1]
    return _on(rank, lambda row: [a._replace(microbatch=other_of_two(a.microbatch)) for a in row])(program)


def _move_stage(program: Program) -> Program:
    """Move the last stage's computation to its neighbour's rank."""
    last, home = program.schedule.n_stages - 1, program.schedule.placement[-2]
    own = [action for row in program.ranks for action in row if action.stage == last and action.kind in COMPUTE]

    def change(rank: int, row: _Row) -> _Row:
        kept = [action for action in row if action not in own]
        return [*kept, *own] if rank == home else kept

    return change_rows(program, change)


def _require_two_ranks(case: Case) -> str:
    """The last two stages must lie on two ranks."""
    return "" if case.stages > 1 and len(set(case.built.placement[-2:])) > 1 else "needs the last two stages apart"


def _waits_in_a_circle(case: Case) -> str:
    return "" if hangs(_renumber_last(lower(case.built))) else "needs microbatch 0 back before 1 is sent"


def _halves(case: Case) -> str:
    halves = any(action.kind is Kind.BACKWARD_WEIGHT for action in case.built.ranks[0])
    return "" if halves else "needs backwards in two halves on rank 0"


def _planned(reorder: Reorder, also: Callable[[Case], str] = ANYTHING.also) -> Entry:
    """Return a changed program, whose ranks may never end."""
    return Entry(reorder=reorder, timeout_s=2.0, needs=Needs(also=also))


PLANTS: Mapping[str, Entry] = {
    "backward-before-forward": _planned(_on(0, lambda row: _put(row, _first(row, _GIVES_INPUT_GRADIENT), 0))),
    "weight-half-first": _planned(_on(0, _weight_first), _halves),
    "warm-up-beyond": _planned(_on(0, _beyond)),
    "backward-missing": _planned(_on(0, lambda row: _drop(row, _last(row, GIVES_WEIGHT_GRADIENT)))),
    "backward-repeated": _planned(_on(0, lambda row: [*row, row[_last(row, GIVES_WEIGHT_GRADIENT)]])),
    "stage-on-other-rank": _planned(_move_stage, _require_two_ranks),
    "microbatches-counted-otherwise": _planned(_renumber_last, _waits_in_a_circle),
    "sends-last": _planned(_on(0, lambda row: sorted(row, key=lambda action: action.kind in SENDS))),
    "send-before-made": _planned(_on(0, lambda row: _put(row, _first(row, SENDS), 0))),
    "receive-after-use": _planned(_on(0, lambda row: _put(row, _first(row, RECEIVES), len(row)))),
    "receive-missing": _planned(_on(0, lambda row: _drop(row, _first(row, RECEIVES)))),
    "sends-crossed": _planned(_cross_sends, _require_two_ranks),
}
