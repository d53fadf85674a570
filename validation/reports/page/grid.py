"""The schedule as a grid, rank x time: where each action stands, what it made, and which message was wrong.

Columns and states are here; ``templates/grid.html`` has lengths and colours.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

from pipeproof.core.cause import OF_MICROBATCHES, Cause
from pipeproof.core.measured import Compared, Done, Ran, Sight
from pipeproof.core.verdict import Verdict, small
from pipeproof.pipeline.action import GIVES_WEIGHT_GRADIENT, Kind
from pipeproof.reports.colours import STEPS, step_of
from pipeproof.reports.panel import WORDS

State = Literal["right", "through", "wrong", "consequence", "culprit", "not compared", "not recorded"]
SAID: Mapping[State, str] = {
    "right": "agrees",
    "through": "agrees by what it went into",
    "wrong": "wrong, and nothing before it was seen wrong",
    "consequence": "wrong, and so was what it was made from",
    "culprit": "the fault is here",
    "not compared": "not compared",
    "not recorded": "not recorded",
}
_BACK = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True)
class Arrow:
    """The way of a tensor that an action took: from an earlier one that made it. ``due``: not this came, but should."""

    start: tuple[int, int]  # rank and column
    end: tuple[int, int]
    due: bool


@dataclass(frozen=True)
class Placed:
    """An action in the grid. ``through``: what it went into that was compared, or what else its tensors do not say."""

    done: Done
    rank: int
    column: int
    state: State
    step: str = ""
    through: str = ""

    @property
    def look(self) -> str:
        """Its classes: what kind of action it is, its state, and its colour."""
        kind = {Kind.FORWARD: "f", Kind.BACKWARD_WEIGHT: "g"}.get(self.done.kind, "b")
        return f"{kind} {self.state.replace(' ', '-')} {self.step}".rstrip()

    @property
    def wrong(self) -> list[Sight]:
        """Its tensors that do not agree."""
        return [sight for sight in self.done.sights if sight.agrees is False]

    @property
    def told(self) -> list[object]:
        """What it says when it is chosen: action, what that is, state, what it went into, and its tensors."""
        stage, kind, microbatch = self.done.stage, self.done.kind, self.done.microbatch
        known = "of a microbatch that nothing tells" if microbatch is None else f"of microbatch {microbatch}"
        head = f"{WORDS[kind]} {known} at stage {stage}, on rank {self.rank}"
        return [self.done.action, head, self.state, self.through, [self.tensor(one) for one in self.done.sights]]

    def tensor(self, one: Sight) -> list[str]:
        """A tensor's name, what was seen, what was expected, its error and what rounding allows, in words."""
        microbatch = self.done.microbatch
        due = "not known" if microbatch is None else f"microbatch {microbatch}'s"
        seen = one.seen.removesuffix(f", expected {due}") or "another tensor"
        return [
            f"{'made' if one.made else 'took'} {one.what}",
            "not compared" if one.agrees is None else ("as expected" if one.agrees else seen),
            due,
            "bit for bit" if one.error == 0 else ("-" if one.error is None else small(one.error)),
            "" if one.limit is None else small(one.limit),
        ]


@dataclass(frozen=True)
class Grid:
    """``verdict``'s run, placed. A column is one action: that says what waits for what, and not how long it took.

    Cells are numbered from ``first`` on.
    """

    verdict: Verdict
    ran: Ran
    first: int = 0

    @cached_property
    def rows(self) -> tuple[tuple[Placed, ...], ...]:
        """The actions of every rank."""
        own = self._culprits
        return tuple(
            tuple(self._placed(done, rank, column, own) for done, column in zip(row, self._columns[rank], strict=True))
            for rank, row in enumerate(self.ran.ranks)
        )

    @cached_property
    def cells(self) -> list[Placed]:
        """All of them, rank by rank."""
        return [*chain.from_iterable(self.rows)]

    @cached_property
    def numbers(self) -> Mapping[tuple[int, int], int]:
        """The number of each cell, by rank and column."""
        return {(one.rank, one.column): number for number, one in enumerate(self.cells, self.first)}

    @property
    def width(self) -> int:
        """How many columns there are."""
        return 1 + max((one.column for one in self.cells), default=-1)

    @cached_property
    def arrows(self) -> tuple[Arrow, ...]:
        """The messages that were wrong: what came, and what should have."""
        where = {one.done.action: (one.rank, one.column) for one in self.cells}
        found = []
        for one in (one for one in self.cells if one.state == "culprit"):
            for sight in (sight for sight in one.done.sights if sight.agrees is False and sight.really):
                for name, due in ((sight.really, False), (sight.due, True)):
                    start = next((where[each] for each in _written(name) if each in where), None)
                    if start is not None and start[1] < one.column:  # what came from nothing before it has no way
                        found.append(Arrow(start, (one.rank, one.column), due))
        return tuple(dict.fromkeys(found))

    @cached_property
    def _columns(self) -> list[list[int]]:
        """When each action can be, if each takes one column: after what it was made from, as far as that ran."""
        ranks, every = self.ran.ranks, {done.action for row in self.ran.ranks for done in row}
        needs = [[self._needs(done) & every for done in row] for row in ranks]
        found: list[list[int]] = [[] for _ in ranks]
        ended: dict[str, int] = {}
        for column in range(sum(map(len, ranks))):
            heads = [(rank, len(found[rank])) for rank, row in enumerate(ranks) if len(found[rank]) < len(row)]
            ready = [
                (rank, slot)
                for rank, slot in heads
                if all(ended.get(name, column) < column for name in needs[rank][slot])
            ]
            for rank, slot in ready or heads:  # what waits for ever ran all the same
                found[rank].append(column)
                ended.setdefault(ranks[rank][slot].action, column)
            if not heads:
                break
        return found

    def _needs(self, done: Done) -> set[str]:
        """What it was made from: what came, where that is known to be another than what should have."""
        came = [(sight.really, sight.due) for sight in done.sights if sight.really and not sight.agrees]
        last = len(self.ran.placement) - 1
        if done.kind is Kind.FORWARD:
            due = {f"{done.stage - 1}F{done.microbatch}"}
        elif done.kind in _BACK:
            above = f"{done.stage + 1}B{done.microbatch}"
            due = {f"{done.stage}F{done.microbatch}"} if done.stage == last else {*_written(above)}
        else:
            due = set()
        not_come = {name for _, due_name in came for name in _written(due_name)}
        return (due - not_come) | {name for really, _ in came for name in _written(really)}

    @cached_property
    def _culprits(self) -> Collection[str]:
        """The actions that causes name; of those at a stage and a microbatch, the ones that are first wrong."""
        return {done.action for cause in self.verdict.cause for done in self._named(cause)}

    def _named(self, cause: Cause) -> Sequence[Done]:
        at = [done for rank, row in enumerate(self.ran.ranks) for done in row if _is_at(done, rank, cause)]
        wrong = [done for done in at if _is_wrong(done.sights)]
        if cause.action is not None:
            return wrong or at
        if not wrong and cause.kind in OF_MICROBATCHES:  # what passed is right: the sums are not
            return [done for done in at if done.kind in GIVES_WEIGHT_GRADIENT]
        return [done for done in wrong if not self._follows(done)] or wrong

    def _placed(self, done: Done, rank: int, column: int, culprits: Collection[str]) -> Placed:
        if done.action in culprits:
            wrong = [sight for sight in done.sights if sight.agrees is False]
            besides = "" if wrong or not done.sights else "what passed here is right, and what was done with it is not"
            step = _worst(wrong or done.sights) or ("w4" if wrong else "")
            return Placed(done, rank, column, "culprit", step, besides)
        if _is_wrong(done.sights):
            step = _worst([sight for sight in done.sights if sight.agrees is False]) or "w4"
            return Placed(done, rank, column, "consequence" if self._follows(done) else "wrong", step)
        told = _made(done)
        if told and all(sight.agrees for sight in told):
            return Placed(done, rank, column, "right", _worst(told) or _worst(done.sights) or "a0")
        through = self._through.get(_went_to(done))
        if through is not None and not done.sights:
            text, step = through
            return Placed(done, rank, column, "through", step, text)
        return Placed(done, rank, column, "not compared" if done.sights else "not recorded")

    def _follows(self, done: Done) -> bool:
        """Whether anything that it was made from was made wrong."""
        own = set() if done.kind is Kind.FORWARD else {f"{done.stage}F{done.microbatch}"}
        return bool((self._needs(done) | own) & self._made_wrong)

    @cached_property
    def _made_wrong(self) -> set[str]:
        """The actions that made something wrong, as far as anybody saw what they made."""
        return {done.action for row in self.ran.ranks for done in row if _is_wrong(_made(done))}

    @cached_property
    def _through(self) -> Mapping[tuple[bool, int | None], tuple[str, str]]:
        """What actions went into, where all of that agrees: a microbatch's loss, or the gradients of a stage."""
        groups: dict[tuple[bool, int], list[Compared]] = defaultdict(list)
        for one in self.verdict.measured.compared:
            at = {"loss": one.microbatch, "gradient": one.stage}.get(one.law)
            if at is not None and one.operation == self.ran.operation:
                groups[one.law == "loss", at].append(one)
        began = "its own tensors were not recorded; the"
        return {
            (forward, number): (
                f"{began} loss of microbatch {number} that it went into agrees"
                if forward
                else f"{began} {len(group)} gradients of stage {number} that it went into agree",
                _worst(group) or "a0",
            )
            for (forward, number), group in groups.items()
            if all(one.outcome == "pass" for one in group)
        }


def _made(done: Done) -> Sequence[Sight]:
    """The tensors that it made, as far as anybody saw them; else those that it took."""
    return [sight for sight in done.sights if sight.made] or done.sights


def _is_wrong(sights: Sequence[Sight]) -> bool:
    return any(sight.agrees is False for sight in sights)


def _went_to(done: Done) -> tuple[bool, int | None]:
    """A forward goes into its microbatch's loss, a backward into its stage's gradients, its first half into those of
    the stage before."""
    if done.kind is Kind.FORWARD:
        return True, done.microbatch
    return False, done.stage - (done.kind is Kind.BACKWARD_INPUT)


def _is_at(done: Done, rank: int, cause: Cause) -> bool:
    """Whether ``cause`` names this action, or its stage and microbatch."""
    stages = cause.stages or (() if cause.stage is None else (cause.stage,))
    if cause.action is not None and done.action == cause.action and not cause.microbatches:
        return True
    ranks = cause.ranks or (() if cause.rank is None else (cause.rank,))
    if not (cause.action or cause.microbatches) or (ranks and rank not in ranks):
        return False
    # A cause names one action for all of its microbatches.
    named = cause.action is None or f"{done.stage}{done.kind.value}" == cause.action.rstrip("?0123456789")
    microbatch = not cause.microbatches or done.microbatch in cause.microbatches
    return named and microbatch and (not stages or done.stage in stages)


def _written(name: str) -> Iterator[str]:
    """As the action ``name`` may be written: a backward is whole, or its first half."""
    if name:
        yield name
        yield name.replace("B", "I")


def _worst(seen: Sequence[Sight] | Sequence[Compared]) -> str:
    """The colour of the largest error, in what rounding allows."""
    return max((step_of(one.error, one.limit) for one in seen), key=("", *STEPS).index, default="")
