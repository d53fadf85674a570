"""What was observed of an operation's actions and parameters, held against the laws about them."""

from collections.abc import Collection, Mapping, Sequence

from pipeproof.core.ledger import NOWHERE, Heading, Ledger
from pipeproof.core.observe.observed import UNKNOWN_MICROBATCH, Crossing, Observed
from pipeproof.core.observe.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from pipeproof.core.oracle import Conditions
from pipeproof.core.verdict import What
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.sizes import first_few
from pipeproof.reference.step import Site

_IN_ACTION = (GIVEN, MADE, KEPT, RECEIVED, HANDED_ON)  # in which order tensors cross


class Headings:
    """Makes headings for a ledger; ``placement`` has the rank of every stage."""

    def __init__(self, placement: Sequence[int]) -> None:
        self._placement = tuple(placement)

    def stage(self, law: str, number: int, scenarios: frozenset[str], stage: int, **where: object) -> Heading:
        """At ``stage``, which may be nowhere, on its rank."""
        if stage == NOWHERE:
            return Heading.at(law, number, scenarios, **where)
        return Heading.at(law, number, scenarios, **{"rank": self._placement[stage], **where}, stage=stage)

    def site(self, law: str, number: int, scenarios: frozenset[str], site: Site) -> Heading:
        """At a parameter."""
        return self.stage(law, number, scenarios, site[0], parameter=site[1])


class Execution:
    """Enters into ``ledger`` how what was observed kept the laws about actions and parameters."""

    def __init__(self, required: Conditions, observed: Observed, ledger: Ledger) -> None:
        self._required = required
        self._observed = observed
        self._ledger = ledger
        self._place = Headings(observed.schedule.placement)

    def orders(self, number: int, laws: frozenset[str], *, backward: bool) -> Mapping[int, Sequence[int]]:
        """The order of each stage's backwards, as it really was; in index order where it was no order of all."""
        every = list(range(self._required.counts[number]))
        for line in range(1 + len(self._observed.copies)):
            self._ran(number, laws, line, backward=backward)
            self._calls(number, laws, line, training=backward)
        ran = {stage: _last_of_each(order) for stage, order in self._observed.backwards(number).items()}
        ordered = {stage: order for stage, order in ran.items() if sorted(order) == every}
        return {stage: every for stage, _ in self._required.due} | ordered

    def _ran(self, number: int, laws: frozenset[str], line: int, *, backward: bool) -> None:
        """Each stage ran each way once for each microbatch."""
        every = list(range(self._required.counts[number]))
        ran: dict[What, dict[int, list[int]]] = {"forward": self._observed.forwards(number, line)}
        if backward:
            ran["backward"] = self._observed.backwards(number, line)
        for what, orders in ran.items():
            idle = self._required.frozen if what == "backward" else ()
            for stage in self._stages(line, but={*self._required.unseen, *idle}):
                order, place = orders[stage], self._of_stage(number, laws, stage, line)
                left = {*self._required.weightless} - {*order} if what == "backward" else set[int]()
                due = [microbatch for microbatch in every if microbatch not in left]
                self._ledger.hold(place, _once_each(order, due), _told(order), tuple(due), what=what)

    def _calls(self, number: int, laws: frozenset[str], line: int, *, training: bool) -> None:
        """Each stage's module itself ran once for each microbatch, in training mode or not as it must be."""
        calls = self._observed.called(number, line)
        for stage in self._stages(line, but=self._required.uncalled):
            place = self._of_stage(number, laws, stage, line)
            seen = sorted(action.microbatch for action, _ in calls if action.stage == stage)
            every = tuple(range(self._required.counts[number]))
            self._ledger.hold(place, _once_each(seen, every), _told(seen), every, what="calls")
            if UNKNOWN_MICROBATCH in seen:
                unknown = f"of {seen.count(UNKNOWN_MICROBATCH)} calls of stage {stage} nothing tells the microbatch"
                self._ledger.remark("microbatches", f"{unknown}: they were counted alone")
            modes = {mode for action, mode in calls if action.stage == stage}
            wrong = modes - {training}
            wrong = wrong if wrong and self._required.mode_matters() else set()
            self._ledger.hold(place, not wrong, not training, training, what="mode")

    def _stages(self, line: int, but: Collection[int]) -> list[int]:
        """The stages of which it is known what ``line`` did."""
        there = self._observed.copies[line - 1] if line else range(self._observed.schedule.n_stages)
        return sorted({*there} - {*but})

    def _of_stage(self, number: int, laws: frozenset[str], stage: int, line: int) -> Heading:
        own = {"rank": self._observed.copies[line - 1][stage]} if line else {}
        return self._place.stage("microbatches", number, laws, stage, **own)

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
                self._ledger.remark("parameters-once", f"{what}: {first_few(names)}")

    def extra_calls(self, number: int, *, doubtful: bool) -> None:
        """Say which calls were beside those of microbatches; ``doubtful``: some may have added to wrong gradients."""
        for stage, (count, adding) in (one for rank in self._observed.ranks for one in rank[number].extra.items()):
            told = f"{count} call{'s' * (count > 1)} of stage {stage} beside those of microbatches"
            (self._ledger.doubt if doubtful and adding else self._ledger.remark)("microbatches", told)

    def uncompared(self, number: int, *, doubtful: bool) -> None:
        """Say how much at the boundaries was not compared; ``doubtful``: it may hide the fault."""
        if count := self._observed.uncompared(number):
            note = f"{count} tensors match no tensor of the reference and were not compared"
            (self._ledger.doubt if doubtful else self._ledger.remark)("boundaries", note)

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
        """Count what passed boundaries in another shape than it was sent in: nothing tells whether that is meant."""
        crossings = [
            crossing for crossing in self._observed.crossings(number) if not (crossing.judged or crossing.same)
        ]
        names = [f"{crossing.what} of {crossing.at}" for crossing in crossings]
        self._ledger.leave_out("boundaries", names, "of another shape than was sent, and not compared")


def _last_of_each(order: Sequence[int]) -> list[int]:
    """``order``, with the last of what comes several times: what came before it may have been cleared."""
    return list(dict.fromkeys(reversed(order)))[::-1]


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
