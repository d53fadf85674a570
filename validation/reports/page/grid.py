"""The schedule as a grid, rank x time: each action's place, state, and wrong messages.

Columns and states come from here, lengths and colours from ``templates/grid.html``.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
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
    "wrong": "wrong, and nothing before it was observed wrong",
    "consequence": "wrong, and so was what it was made from",
    "culprit": "the fault is here",
    "not compared": "not compared",
    "not recorded": "not recorded",
}
_BACK = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True)
class Arrow:
    """The way of a received tensor, from the earlier action that made it.

    ``expected``: the message that should have come, but did not.
    """

    start: tuple[int, int]  # rank and column
    end: tuple[int, int]
    expected: bool


@dataclass(frozen=True)
class Placed:
    """An action in the grid. ``through``: a compared result downstream, or another remark on its tensors."""

    done: Done
    rank: int
    column: int
    state: State
    step: str = ""
    through: str = ""

    @property
    def look(self) -> str:
        """CSS classes: kind of action, state, and colour."""
        kind = {Kind.FORWARD: "f", Kind.BACKWARD_WEIGHT: "g"}.get(self.done.kind, "b")
        return f"{kind} {self.state.replace(' ', '-')} {self.step}".rstrip()

    @property
    def wrong(self) -> list[Sight]:
        """Its wrong tensors."""
        return [sight for sight in self.done.sights if sight.agrees is False]

    @property
    def details(self) -> list[object]:
        """Details on selection: action, description, state, downstream result, and tensors."""
        stage, kind, microbatch = self.done.stage, self.done.kind, self.done.microbatch
        known = "of a microbatch that nothing tells" if microbatch is None else f"of microbatch {microbatch}"
        head = f"{WORDS[kind]} {known} at stage {stage}, on rank {self.rank}"
        return [self.done.action, head, self.state, self.through, [self.tensor(one) for one in self.done.sights]]

    def tensor(self, one: Sight) -> list[str]:
        """A tensor in words: name, observed, expected, error and rounding limit."""
        microbatch = self.done.microbatch
        expected = "not known" if microbatch is None else f"microbatch {microbatch}'s"
        observed = one.observed.removesuffix(f", expected {expected}") or "another tensor"
        return [
            f"{'made' if one.made else 'took'} {one.what}",
            "not compared" if one.agrees is None else ("as expected" if one.agrees else observed),
            expected,
            "bit for bit" if one.error == 0 else ("-" if one.error is None else small(one.error)),
            "" if one.limit is None else small(one.limit),
        ]


class Grid:
    """``verdict``'s run as a grid. A column is one action: it shows order, not time.

    Cells are numbered from ``first`` on. ``rows``: actions by rank. ``cells``: all of them, rank by rank. ``numbers``:
    of each cell, by rank and column. ``arrows``: wrong messages, observed and expected.
    """

    def __init__(self, verdict: Verdict, ran: Ran, first: int = 0) -> None:
        self.verdict, self.ran, self.first = verdict, ran, first
        every = [(rank, done) for rank, row in enumerate(ran.ranks) for done in row]
        self._made_wrong = {done.action for _, done in every if _is_wrong(_outputs_of(done))}
        self._through = _results_downstream(
            verdict.measured.of("loss") + verdict.measured.of("gradient"), ran.operation
        )
        # A wrong action follows from others only where these are known to be wrong: so that is known first.
        culprits = {name for cause in verdict.causes for name in self._culprits(cause, every)}
        self.rows = [
            [
                Placed(done, rank, column, *self._state(done, culprits))
                for done, column in zip(row, columns, strict=True)
            ]
            for rank, (row, columns) in enumerate(zip(ran.ranks, self._columns(), strict=True))
        ]
        self.cells = [*chain.from_iterable(self.rows)]
        self.numbers = {(one.rank, one.column): number for number, one in enumerate(self.cells, first)}
        self.width = 1 + max((one.column for one in self.cells), default=-1)
        self.arrows = tuple(dict.fromkeys(self._arrows()))

    def _arrows(self) -> Iterator[Arrow]:
        where = {one.done.action: (one.rank, one.column) for one in self.cells}
        for one in (one for one in self.cells if one.state == "culprit"):
            for sight in (sight for sight in one.wrong if sight.really):
                for name, expected in ((sight.really, False), (sight.expected, True)):
                    start = next((where[each] for each in _spellings(name) if each in where), None)
                    if start is not None and start[1] < one.column:  # an arrow needs an earlier start
                        yield Arrow(start, (one.rank, one.column), expected)

    def _columns(self) -> list[list[int]]:
        """Place each action in the earliest column after its sources, if these ran."""
        ranks, every = self.ran.ranks, {done.action for row in self.ran.ranks for done in row}
        needs = [[self._needs(done) & every for done in row] for row in ranks]
        found: list[list[int]] = [[] for _ in ranks]
        ended: dict[str, int] = {}
        for column in count():
            heads = [(rank, len(own)) for rank, own in enumerate(found) if len(own) < len(ranks[rank])]
            if not heads:
                return found
            free = [(rank, k) for rank, k in heads if all(ended.get(name, column) < column for name in needs[rank][k])]
            for rank, k in free or heads:  # an action that would wait for ever ran all the same
                found[rank].append(column)
                ended.setdefault(ranks[rank][k].action, column)  # who waits for what ran twice needs the first
        raise AssertionError("each column has an action")

    def _needs(self, done: Done) -> set[str]:
        """Sources for an action: received tensors, if known to differ from the expected ones."""
        came = [sight for sight in done.sights if sight.really and not sight.agrees]
        stage, microbatch, expected = done.stage, done.microbatch, set[str]()
        if done.kind is Kind.FORWARD:
            expected = {f"{stage - 1}F{microbatch}"}
        elif done.kind in _BACK:
            last = stage == len(self.ran.placement) - 1
            expected = {f"{stage}F{microbatch}"} if last else {*_spellings(f"{stage + 1}B{microbatch}")}
        # What did not come was not waited for; what came in its place was.
        expected -= {name for sight in came for name in _spellings(sight.expected)}
        return expected | {name for sight in came for name in _spellings(sight.really)}

    def _culprits(self, cause: Cause, every: Sequence[tuple[int, Done]]) -> Iterator[str]:
        """Actions that a cause names; for a stage and a microbatch, the first wrong ones."""
        at = [done for rank, done in every if _is_at(done, rank, cause)]
        wrong = [done for done in at if _is_wrong(done.sights)]
        if cause.action is not None:
            found = wrong or at
        elif not wrong and cause.kind in OF_MICROBATCHES:  # crossings are right: the sums are not
            found = [done for done in at if done.kind in GIVES_WEIGHT_GRADIENT]
        else:
            found = [done for done in wrong if not self._follows(done)] or wrong
        return (done.action for done in found)

    def _state(self, done: Done, culprits: Collection[str]) -> tuple[State, str, str]:
        """How an action went, the colour of its largest error, and a remark on its tensors."""
        wrong = [sight for sight in done.sights if sight.agrees is False]
        if done.action in culprits:
            besides = "" if wrong or not done.sights else "what passed here is right, and what was done with it is not"
            return "culprit", _worst(wrong or done.sights) or "w4" * bool(wrong), besides
        if wrong:
            return "consequence" if self._follows(done) else "wrong", _worst(wrong) or "w4", ""
        outputs = _outputs_of(done)
        if outputs and all(sight.agrees for sight in outputs):
            return "right", _worst(outputs) or _worst(done.sights) or "a0", ""
        if done.sights:
            return "not compared", "", ""
        # A forward goes into its microbatch's loss, a backward into its stage's gradients, I into the previous stage's.
        forward, stage = done.kind is Kind.FORWARD, done.stage - (done.kind is Kind.BACKWARD_INPUT)
        if through := self._through.get((forward, done.microbatch if forward else stage)):
            return "through", *through
        return "not recorded", "", ""

    def _follows(self, done: Done) -> bool:
        """True if any source went wrong."""
        own = set() if done.kind is Kind.FORWARD else {f"{done.stage}F{done.microbatch}"}
        return bool((self._needs(done) | own) & self._made_wrong)


def _results_downstream(
    compared: Sequence[Compared], operation: int
) -> Mapping[tuple[bool, int | None], tuple[str, str]]:
    """Colours and texts of results that agree: of a microbatch's loss, or of the gradients on a stage."""
    groups = defaultdict[tuple[bool, int | None], list[Compared]](list)
    for one in compared:
        if one.operation == operation:
            groups[one.law == "loss", one.microbatch if one.law == "loss" else one.stage].append(one)
    found: dict[tuple[bool, int | None], tuple[str, str]] = {}
    for (loss, number), group in groups.items():
        if number is not None and all(one.outcome == "pass" for one in group):
            what = f"loss of microbatch {number} that it went into agrees"
            what = what if loss else f"{len(group)} gradients of stage {number} that it went into agree"
            found[loss, number] = _worst(group) or "a0", f"its own tensors were not recorded; the {what}"
    return found


def _outputs_of(done: Done) -> Sequence[Sight]:
    """The action's outputs, or inputs if unobserved."""
    return [sight for sight in done.sights if sight.made] or done.sights


def _is_wrong(sights: Sequence[Sight]) -> bool:
    return any(sight.agrees is False for sight in sights)


def _is_at(done: Done, rank: int, cause: Cause) -> bool:
    """True if ``cause`` names this action, or its stage and microbatch."""
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


def _spellings(name: str) -> Iterator[str]:
    """Spellings of the action ``name``: a backward may be whole, or its first half."""
    if name:
        yield name
        yield name.replace("B", "I")


def _worst(observed: Sequence[Sight] | Sequence[Compared]) -> str:
    """Colour the largest error, in rounding units."""
    return max((step_of(one.error, one.limit) for one in observed), key=("", *STEPS).index, default="")
