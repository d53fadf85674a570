"""The schedule as a grid, rank x time: each action's place, state, and wrong messages.

Columns and states come from here, lengths and colours from ``templates/grid.html``.
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


@dataclass(frozen=True)
class Grid:
    """``verdict``'s run as a grid. A column is one action: it shows order, not time.

    Cells are numbered from ``first`` on.
    """

    verdict: Verdict
    ran: Ran
    first: int = 0

    @cached_property
    def rows(self) -> tuple[tuple[Placed, ...], ...]:
        """Actions by rank."""
        own = self._culprits
        return tuple(
            tuple(self._place(done, rank, column, own) for done, column in zip(row, self._columns[rank], strict=True))
            for rank, row in enumerate(self.ran.ranks)
        )

    @cached_property
    def cells(self) -> list[Placed]:
        """All cells, rank by rank."""
        return [*chain.from_iterable(self.rows)]

    @cached_property
    def numbers(self) -> Mapping[tuple[int, int], int]:
        """Number of each cell, by rank and column."""
        return {(one.rank, one.column): number for number, one in enumerate(self.cells, self.first)}

    @property
    def width(self) -> int:
        """Number of columns."""
        return 1 + max((one.column for one in self.cells), default=-1)

    @cached_property
    def arrows(self) -> tuple[Arrow, ...]:
        """Wrong messages: observed and expected."""
        where = {one.done.action: (one.rank, one.column) for one in self.cells}
        found = []
        for one in (one for one in self.cells if one.state == "culprit"):
            for sight in (sight for sight in one.done.sights if sight.agrees is False and sight.really):
                for name, expected in ((sight.really, False), (sight.expected, True)):
                    start = next((where[each] for each in _spellings(name) if each in where), None)
                    if start is not None and start[1] < one.column:  # an arrow needs an earlier start
                        found.append(Arrow(start, (one.rank, one.column), expected))
        return tuple(dict.fromkeys(found))

    @cached_property
    def _columns(self) -> list[list[int]]:
        """Place each action in the earliest column after its sources, if these ran."""
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
            for rank, slot in ready or heads:  # an action that would wait for ever ran all the same
                found[rank].append(column)
                ended.setdefault(ranks[rank][slot].action, column)
            if not heads:
                break
        return found

    def _needs(self, done: Done) -> set[str]:
        """Sources for an action: received tensors, if known to differ from the expected ones."""
        came = [(sight.really, sight.expected) for sight in done.sights if sight.really and not sight.agrees]
        last = len(self.ran.placement) - 1
        if done.kind is Kind.FORWARD:
            expected = {f"{done.stage - 1}F{done.microbatch}"}
        elif done.kind in _BACK:
            above = f"{done.stage + 1}B{done.microbatch}"
            expected = {f"{done.stage}F{done.microbatch}"} if done.stage == last else {*_spellings(above)}
        else:
            expected = set()
        not_come = {name for _, expected_name in came for name in _spellings(expected_name)}
        return (expected - not_come) | {name for really, _ in came for name in _spellings(really)}

    @cached_property
    def _culprits(self) -> Collection[str]:
        """Actions named by causes; for a stage and a microbatch, the first wrong ones."""
        named = set[str]()
        for cause in self.verdict.causes:
            at = [done for rank, row in enumerate(self.ran.ranks) for done in row if _is_at(done, rank, cause)]
            wrong = [done for done in at if _is_wrong(done.sights)]
            if cause.action is not None:
                found = wrong or at
            elif not wrong and cause.kind in OF_MICROBATCHES:  # crossings are right: the sums are not
                found = [done for done in at if done.kind in GIVES_WEIGHT_GRADIENT]
            else:
                found = [done for done in wrong if not self._follows(done)] or wrong
            named |= {done.action for done in found}
        return named

    def _place(self, done: Done, rank: int, column: int, culprits: Collection[str]) -> Placed:
        if done.action in culprits:
            wrong = [sight for sight in done.sights if sight.agrees is False]
            besides = "" if wrong or not done.sights else "what passed here is right, and what was done with it is not"
            step = _worst(wrong or done.sights) or ("w4" if wrong else "")
            return Placed(done, rank, column, "culprit", step, besides)
        if _is_wrong(done.sights):
            step = _worst([sight for sight in done.sights if sight.agrees is False]) or "w4"
            return Placed(done, rank, column, "consequence" if self._follows(done) else "wrong", step)
        outputs = _outputs_of(done)
        if outputs and all(sight.agrees for sight in outputs):
            return Placed(done, rank, column, "right", _worst(outputs) or _worst(done.sights) or "a0")
        # A forward goes into its microbatch's loss, a backward into its stage's gradients, I into the previous stage's.
        forward, stage = done.kind is Kind.FORWARD, done.stage - (done.kind is Kind.BACKWARD_INPUT)
        through = self._through.get((forward, done.microbatch if forward else stage))
        if through is not None and not done.sights:
            text, step = through
            return Placed(done, rank, column, "through", step, text)
        return Placed(done, rank, column, "not compared" if done.sights else "not recorded")

    def _follows(self, done: Done) -> bool:
        """True if any source went wrong."""
        own = set() if done.kind is Kind.FORWARD else {f"{done.stage}F{done.microbatch}"}
        return bool((self._needs(done) | own) & self._made_wrong)

    @cached_property
    def _made_wrong(self) -> set[str]:
        """Actions with a wrong output, if observed."""
        return {done.action for row in self.ran.ranks for done in row if _is_wrong(_outputs_of(done))}

    @cached_property
    def _through(self) -> Mapping[tuple[bool, int | None], tuple[str, str]]:
        """Downstream results that agree: a microbatch's loss, or the gradients on a stage."""
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
