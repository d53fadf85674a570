"""What was observed of an operation's actions and parameters, held against the laws about them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from pipeproof.judging.comparison import hold_claim
from pipeproof.judging.ledger import NOWHERE, Heading, Headings, Ledger
from pipeproof.judging.verdict import Mismatch, Value, What, names_of
from pipeproof.observers.observed import UNKNOWN_MICROBATCH, Crossing, Observed
from pipeproof.observers.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from pipeproof.pipeline.action import Kind
from pipeproof.reference.step import Site

_IN_ACTION = (GIVEN, MADE, KEPT, RECEIVED, HANDED_ON)  # in which order tensors cross


class Conditions(Protocol):
    """What must hold of actions and parameters, as ``Requirements`` has it."""

    @property
    def plan(self) -> tuple[str, ...]: ...

    @property
    def microbatches(self) -> int: ...

    @property
    def due(self) -> frozenset[Site]: ...

    @property
    def unmatched(self) -> Mapping[Site, str]: ...

    @property
    def unseen(self) -> Collection[int]: ...

    @property
    def uncalled(self) -> Collection[int]: ...

    @property
    def frozen(self) -> Collection[int]: ...

    @property
    def traced(self) -> Collection[int]: ...

    @property
    def mode_matters(self) -> Callable[[], bool]: ...


class Execution:
    """Enters into ``ledger`` how what was observed kept the laws about actions and parameters."""

    def __init__(self, required: Conditions, observed: Observed, ledger: Ledger) -> None:
        self._required = required
        self._observed = observed
        self._ledger = ledger
        self._place = Headings(observed.schedule.placement)
        self._counted: list[Mismatch] = []

    def orders(self, number: int, laws: frozenset[str], *, backward: bool) -> Mapping[int, Sequence[int]]:
        """The order of each stage's backwards, as it really was; in index order where it was no order of all."""
        every = list(range(self._required.microbatches))
        for line in range(1 + len(self._observed.copies)):
            self._ran(number, laws, line, backward=backward)
            self._calls(number, laws, line, training=backward)
        ordered = {stage: order for stage, order in self._observed.backwards(number).items() if sorted(order) == every}
        return {stage: every for stage, _ in self._required.due} | ordered

    def _ran(self, number: int, laws: frozenset[str], line: int, *, backward: bool) -> None:
        """Each stage ran each way once for each microbatch."""
        every = list(range(self._required.microbatches))
        ran: dict[What, dict[int, list[int]]] = {"forward": self._observed.forwards(number, line)}
        if backward:
            ran["backward"] = self._observed.backwards(number, line)
        for what, orders in ran.items():
            idle = self._required.frozen if what == "backward" else ()
            for stage in self._stages(line, but={*self._required.unseen, *idle}):
                order, place = orders[stage], self._of_stage(number, laws, stage, line)
                counted = stage not in self._required.traced
                self._hold(place, _once_each(order, every), _told(order), tuple(every), what=what, counted=counted)

    def _calls(self, number: int, laws: frozenset[str], line: int, *, training: bool) -> None:
        """Each stage's module itself ran once for each microbatch, in training mode or not as it must be."""
        calls = self._observed.called(number, line)
        for stage in self._stages(line, but=self._required.uncalled):
            place = self._of_stage(number, laws, stage, line)
            seen = sorted(action.microbatch for action, _ in calls if action.stage == stage)
            every = tuple(range(self._required.microbatches))
            self._hold(place, _once_each(seen, every), _told(seen), every, what="calls")
            if UNKNOWN_MICROBATCH in seen:
                unknown = f"of {seen.count(UNKNOWN_MICROBATCH)} calls of stage {stage} nothing tells the microbatch"
                self._ledger.remark("microbatches", f"{unknown}: they were counted alone")
            modes = {mode for action, mode in calls if action.stage == stage}
            wrong = modes - {training}
            wrong = wrong if wrong and self._required.mode_matters() else set()
            self._hold(place, not wrong, not training, training, what="mode")

    def _stages(self, line: int, but: Collection[int]) -> list[int]:
        """The stages of which it is known what ``line`` did."""
        there = self._observed.copies[line - 1] if line else range(self._observed.schedule.n_stages)
        return sorted({*there} - {*but})

    def _of_stage(self, number: int, laws: frozenset[str], stage: int, line: int) -> Heading:
        own = {"rank": self._observed.copies[line - 1][stage]} if line else {}
        return self._place.stage("microbatches", number, laws, stage, **own)

    def _hold(
        self, place: Heading, holds: bool, seen: Value, expected: Value, *, what: What, counted: bool = True
    ) -> None:
        """Enter what calls show; ``counted``: by hooks, which may miss a call, and see those of no training."""
        before = len(self._ledger.mismatches)
        self._ledger.hold(place, holds, seen, expected, what=what)
        self._counted += self._ledger.mismatches[before:] if counted else []

    def by_numbers(self, right: Collection[int], laws: frozenset[str], *, what: str = "its gradients") -> None:
        """Let pass how often and in which mode the stages ran of which ``what`` is ``right``."""
        found = [mismatch for mismatch in self._counted if mismatch.stage in right]
        self._counted = []
        self._ledger.strike(found, laws)
        for one in found:
            self._ledger.remark("microbatches", f"stage {one.stage}: {one.seen}, and {what} are right")

    def parameters_once(self) -> None:
        """Every parameter that is due is held once, and nothing else is."""
        due, last = self._required.due, max(k for k, name in enumerate(self._required.plan) if name == "train")
        for site, why in sorted(self._required.unmatched.items()):
            place = self._place.site("parameters-once", last, frozenset(), site)
            self._ledger.hold(place, False, why, "a parameter of the reference")
        seen = self._observed.held(last)
        for site in sorted(due | set(seen)):
            stage = None if site[0] == NOWHERE else site[0]
            place = Heading.at("parameters-once", last, frozenset(), stage=stage, parameter=site[1])
            count = seen.count(site)
            self._ledger.hold(place, count == (site in due), count, int(site in due), what="held")
        lost = [name for stage, name in sorted(due) if stage == NOWHERE]
        for what, names in (
            ("unknown", [name for _, name in sorted(self._required.unmatched)]),
            ("held by none", lost),
        ):
            if names:
                self._ledger.remark("parameters-once", f"{what}: {names_of(names)}")

    def uncompared(self, number: int) -> None:
        """Say how much at the boundaries was not compared: beside gradients that are wrong, that may hide the fault."""
        count = self._observed.uncompared(number)
        note = f"{count} tensors were not compared: their content is at no place in the reference"
        if count and any(m.law in ("gradient", "presence") for m in self._ledger.mismatches):
            self._ledger.doubt("boundaries", note)
        elif count:
            self._ledger.remark("boundaries", note)

    def claims(self, number: int, laws: frozenset[str]) -> None:
        """What must hold between ranks that have a stage in common."""
        for claim in (claim for rank in self._observed.ranks for claim in rank[number].claims):
            hold_claim(self._ledger, claim, number, laws)

    def crossings(self, number: int, laws: frozenset[str]) -> None:
        """What passed the boundaries of stages, along the flow of data: the first to differ is nearest to the fault."""
        crossings = [crossing for crossing in self._observed.crossings(number) if crossing.judged]
        for crossing in sorted(crossings, key=lambda one: flow(one, self._observed.schedule.n_stages)):
            stage, _, microbatch = crossing.action
            known = None if microbatch == UNKNOWN_MICROBATCH else microbatch
            own = {} if crossing.rank is None else {"rank": crossing.rank}
            place = self._place.stage("boundaries", number, laws, stage, microbatch=known, action=crossing.at, **own)
            seen, expected = f"{crossing.what}: {crossing.seen}", f"microbatch {'?' if known is None else known}'s"
            self._ledger.hold(place, crossing.same, seen, expected, exact=crossing.exact)

    def left_out(self, number: int) -> None:
        """Count what passed boundaries and was not compared: it hides nothing, unless something is wrong."""
        crossings = [crossing for crossing in self._observed.crossings(number) if not crossing.judged]
        names = [f"{crossing.what} of {crossing.at}" for crossing in crossings]
        self._ledger.leave_out("boundaries", names, "not compared", hides=self._ledger.failed)


def _once_each(order: Sequence[int], every: Sequence[int]) -> bool:
    """Whether ``order`` has each microbatch once, where calls of which nothing tells it may be those that are left."""
    known = [microbatch for microbatch in order if microbatch != UNKNOWN_MICROBATCH]
    return len(order) == len(every) and len(set(known)) == len(known) and set(known) <= set(every)


def _told(order: Sequence[int]) -> tuple[int | None, ...]:
    return tuple(None if microbatch == UNKNOWN_MICROBATCH else microbatch for microbatch in order)


def flow(crossing: Crossing, n_stages: int) -> tuple[bool, int, int, int]:
    """Where ``crossing`` comes in the flow of data: forwards down the stages, then backwards up."""
    action = crossing.action
    forward = action.kind is Kind.FORWARD
    after = _IN_ACTION.index(crossing.where) if crossing.where in _IN_ACTION else 0
    return not forward, action.stage if forward else n_stages - action.stage, action.microbatch, after
