"""Faults of order: changed programs, which a static law refuses before any rank runs them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from pipeproof.own.case import Case
from pipeproof.own.faults import Reorder
from pipeproof.pipeline.action import COMPUTE, GIVES_WEIGHT_GRADIENT, RECEIVES, SENDS, Action, Kind
from pipeproof.pipeline.columns import Columns
from pipeproof.pipeline.deadlock import deadlocks
from pipeproof.pipeline.program import Program, lower
from pipeproof.pipeline.program_laws import violations
from pipeproof.pipeline.transports import Transport
from pipeproof.wings.specimens.specimen import Fault, Needs, Specimen, row

_Row = Sequence[Action]
_GIVES_INPUT_GRADIENT = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})


def changed(program: Program, change: Callable[[int, _Row], _Row]) -> Program:
    """``program`` with every rank's row changed; its schedule is what the new rows compute."""
    rows = [tuple(change(rank, row)) for rank, row in enumerate(program.ranks)]
    compute = tuple(tuple(action for action in row if action.kind in COMPUTE) for row in rows)
    return Program(replace(program.schedule, ranks=compute, overlaps=()), Columns.of(rows))


def exchanged(program: Program, one: Action, other: Action) -> Program:
    """``program`` with two actions in each other's places."""
    places = {one: other, other: one}
    return changed(program, lambda rank, row: [places.get(action, action) for action in row])


def other_of_two(microbatch: int) -> int:
    """Microbatch 1 for 0, and 0 for 1."""
    return {0: 1, 1: 0}.get(microbatch, microbatch)


def hangs(program: Program) -> bool:
    """Whether ranks wait for each other whatever the transport."""
    return deadlocks(program)[Transport.UNLIMITED] is not None


def broken(program: Program) -> tuple[str, ...]:
    """The static laws that ``program`` breaks, each once."""
    return tuple(dict.fromkeys(violation.law for violation in violations(program)))


def _on(rank: int, change: Callable[[_Row], _Row]) -> Reorder:
    """Change the row of one rank; negative ranks count from the last."""

    def reorder(program: Program) -> Program:
        return changed(program, lambda r, row: change(row) if r == rank % len(program.ranks) else row)

    return reorder


def _first(row: _Row, kinds: frozenset[Kind]) -> int:
    return next(slot for slot, action in enumerate(row) if action.kind in kinds)


def _last(row: _Row, kinds: frozenset[Kind]) -> int:
    return max(slot for slot, action in enumerate(row) if action.kind in kinds)


def _without(row: _Row, slot: int) -> _Row:
    return [*row[:slot], *row[slot + 1 :]]


def _put(row: _Row, slot: int, to: int) -> _Row:
    """With the action of ``slot`` in another place."""
    rest = _without(row, slot)
    return [*rest[:to], row[slot], *rest[to:]]


def _weight_first(row: _Row) -> _Row:
    slot = _first(row, frozenset({Kind.BACKWARD_WEIGHT}))
    return _put(row, slot, row.index(row[slot]._replace(kind=Kind.BACKWARD_INPUT)))


def _beyond(row: _Row) -> _Row:
    """One more forward in warm-up than there are microbatches."""
    slot = _last(row, frozenset({Kind.FORWARD}))
    return [*row[: slot + 1], row[slot]._replace(microbatch=row[slot].microbatch + 1), *row[slot + 1 :]]


def _cross_sends(program: Program) -> Program:
    """The first of two messages to the last stage waits until the second has been sent."""
    stage = program.schedule.n_stages - 2
    one, other = (Action(stage, Kind.SEND_F, m) for m in (0, 1))

    return changed(program, lambda rank, row: _put(row, row.index(one), row.index(other)) if other in row else row)


def _counted_otherwise(program: Program) -> Program:
    """On the last rank, microbatch 0 comes where 1 did, and the other way round."""
    rank = program.schedule.placement[-1]
    return _on(rank, lambda row: [a._replace(microbatch=other_of_two(a.microbatch)) for a in row])(program)


def _moved(program: Program) -> Program:
    """What the last stage computes, its neighbour's rank computes."""
    last, home = program.schedule.n_stages - 1, program.schedule.placement[-2]
    own = [action for row in program.ranks for action in row if action.stage == last and action.kind in COMPUTE]

    def change(rank: int, row: _Row) -> _Row:
        kept = [action for action in row if action not in own]
        return [*kept, *own] if rank == home else kept

    return changed(program, change)


def _apart(case: Case) -> str:
    """The last two stages must lie on two ranks."""
    return "" if case.stages > 1 and len(set(case.built.placement[-2:])) > 1 else "needs the last two stages apart"


def _waits_in_a_circle(case: Case) -> str:
    return "" if hangs(_counted_otherwise(lower(case.built))) else "needs microbatch 0 back before 1 is sent"


def _halves(case: Case) -> str:
    halves = any(action.kind is Kind.BACKWARD_WEIGHT for action in case.built.ranks[0])
    return "" if halves else "needs backwards in two halves on rank 0"


_ON_TWO = Needs(ranks=2)
_row = partial(row, timeout_s=2.0)  # ranks that can never end

SPECIMENS: Mapping[str, Specimen] = {
    "backward-before-forward": _row(
        Fault("order", "local-order"), reorder=_on(0, lambda row: _put(row, _first(row, _GIVES_INPUT_GRADIENT), 0))
    ),
    "weight-half-first": _row(
        Fault("order", "local-order"), reorder=_on(0, _weight_first), needs=Needs(also=_halves), schedule="zb-h1"
    ),
    "warm-up-beyond": _row(Fault("order", "placement"), reorder=_on(0, _beyond)),
    "backward-missing": _row(
        Fault("order", "completeness"), reorder=_on(0, lambda row: _without(row, _last(row, GIVES_WEIGHT_GRADIENT)))
    ),
    "backward-repeated": _row(
        Fault("order", "completeness"), reorder=_on(0, lambda row: [*row, row[_last(row, GIVES_WEIGHT_GRADIENT)]])
    ),
    "stage-on-other-rank": _row(Fault("order", "placement"), reorder=_moved, needs=Needs(ranks=2, also=_apart)),
    "microbatches-counted-otherwise": _row(
        Fault("deadlock", "acyclic", alike=("order",)),
        reorder=_counted_otherwise,
        needs=Needs(ranks=2, microbatches=2, also=_waits_in_a_circle),
    ),
    "sends-last": _row(
        Fault("deadlock", "deadlock", alike=("order",)),
        reorder=_on(0, lambda row: sorted(row, key=lambda action: action.kind in SENDS)),
        needs=_ON_TWO,
    ),
    "send-before-made": _row(
        Fault("order", "message-order"), reorder=_on(0, lambda row: _put(row, _first(row, SENDS), 0)), needs=_ON_TWO
    ),
    "receive-after-use": _row(
        Fault("order", "message-order"),
        reorder=_on(0, lambda row: _put(row, _first(row, RECEIVES), len(row))),
        needs=_ON_TWO,
    ),
    "receive-missing": _row(
        Fault("order", "messages"), reorder=_on(0, lambda row: _without(row, _first(row, RECEIVES))), needs=_ON_TWO
    ),
    "sends-crossed": _row(
        Fault("order", "channel-order"), reorder=_cross_sends, needs=Needs(ranks=2, microbatches=2, also=_apart)
    ),
}
