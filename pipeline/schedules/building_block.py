"""Schedules over a V by repeating one building block every six units of time (Qi et al., arXiv 2405.15362).

A block is a microbatch's four passes on each rank: when F0, F1, I1 and I0 start if the microbatch enters at 0. The W
fill the two units of six that are left. That fixes the memory; what idles at both ends is then filled as far as the
memory allows.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate

from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules.vee import placement

PERIOD = 6
_CHANGE = {Kind.FORWARD: 1, Kind.BACKWARD_INPUT: 0, Kind.BACKWARD_WEIGHT: -1}
Block = tuple[int, int, int, int]  # when F0, F1, I1 and I0 start on a rank


def repeat_block(name: str, block: Callable[[int], Block], *, ranks: int, microbatches: int) -> Schedule:
    """Repeat ``block(rank)`` for every microbatch, six units apart, then fill. Any M >= 1."""
    rows = tuple(_stable(rank, block(rank), ranks=ranks, microbatches=microbatches) for rank in range(ranks))
    return Schedule(name, microbatches, placement(ranks), _fill(rows, 2 * ranks))


def _stable(rank: int, block: Block, *, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """One rank's actions in time order; each W in the first free unit after its I, first come first."""
    chunks = ((rank, Kind.FORWARD), (2 * ranks - 1 - rank, Kind.FORWARD), (2 * ranks - 1 - rank, Kind.BACKWARD_INPUT))
    passes = tuple(zip(block, (*chunks, (rank, Kind.BACKWARD_INPUT)), strict=True))
    assert len({start % PERIOD for start in block}) == len(block), f"{block} runs two passes at one time"
    timed = sorted(
        (start + PERIOD * m, Action(stage, kind, m)) for start, (stage, kind) in passes for m in range(microbatches)
    )
    row: list[Action] = []
    waiting: list[tuple[int, Action]] = []
    now = 0
    for start, action in timed:
        while waiting and now < start:
            row.append(heappop(waiting)[1])
            now += 1
        row.append(action)
        now = start + 1
        if action.kind is Kind.BACKWARD_INPUT:
            heappush(waiting, (start, action._replace(kind=Kind.BACKWARD_WEIGHT)))
    return (*row, *(action for _, action in sorted(waiting)))


def _fill(rows: Sequence[Sequence[Action]], n_stages: int) -> tuple[tuple[Action, ...], ...]:
    """Run ``rows`` unit by unit, each rank taking its first ready action that fits its memory.

    An action that overtakes others must leave room for them: no row may ever hold more than any of ``rows`` did. What
    was overtaken can still run, so this never gets stuck. Once a rank has no forward left, its W wait for an idle unit.
    """
    limit = max(max(accumulate(_CHANGE[action.kind] for action in row)) for row in rows)
    ranks = [_Rank(row, n_stages, limit) for row in rows]
    done: set[tuple[int, Kind, int]] = set()
    while any(rank.todo for rank in ranks):
        ran = [action for rank in ranks if (action := rank.step(done)) is not None]
        assert ran, "a schedule that can run in its own order can run in this one"
        done.update(ran)
    return tuple(tuple(rank.row) for rank in ranks)


class _Rank:
    """A rank during the filling. Within a stage and a kind, microbatches keep their order."""

    def __init__(self, row: Sequence[Action], n_stages: int, limit: int) -> None:
        self.row: list[Action] = []
        self.todo = list(row)
        self._last, self._limit, self._held = n_stages - 1, limit, 0
        self._forwards = sum(action.kind is Kind.FORWARD for action in row)
        self._next = {(action.stage, action.kind): action for action in reversed(row)}
        self._end = 1 + max(action.microbatch for action in row)

    def step(self, done: set[tuple[int, Kind, int]]) -> Action | None:
        """Run an action, given ``done`` actions; None if stuck."""
        ready = {action for action in self._next.values() if self._can_run(action, done)}
        place = None if self._forwards else self._first({a for a in ready if a.kind is not Kind.BACKWARD_WEIGHT})
        if place is None:
            place = self._first(ready)
        if place is None:
            return None
        action = self.todo.pop(place)
        self._held += _CHANGE[action.kind]
        self._forwards -= action.kind is Kind.FORWARD
        self._next[action.stage, action.kind] = after = action._replace(microbatch=action.microbatch + 1)
        if after.microbatch == self._end:
            del self._next[action.stage, action.kind]
        self.row.append(action)
        return action

    def _first(self, ready: set[Action]) -> int | None:
        """Find the first ``ready`` action that fits."""
        if not ready:
            return None
        held = most = self._held
        waiting = set(ready)
        # What can run lies within the microbatches in flight, of which there are no more than the limit allows.
        for place, action in enumerate(self.todo[: PERIOD * (self._limit + 1)]):
            if action in waiting:
                if place == 0 or most + (action.kind is Kind.FORWARD) <= self._limit:
                    return place
                waiting.remove(action)
                if not waiting:
                    return None
            held += _CHANGE[action.kind]
            most = max(most, held)
        return None

    def _can_run(self, action: Action, done: set[tuple[int, Kind, int]]) -> bool:
        stage, kind, m = action
        if kind is Kind.FORWARD:
            return stage == 0 or (stage - 1, kind, m) in done
        if kind is Kind.BACKWARD_WEIGHT:
            return (stage, Kind.BACKWARD_INPUT, m) in done
        return (stage, Kind.FORWARD, m) in done and (stage == self._last or (stage + 1, kind, m) in done)
