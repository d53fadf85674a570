"""What was held and what ran, before any number is compared: parameters, microbatches and what crossed boundaries."""

from collections.abc import Collection, Mapping, Sequence

from pipeline.action import Action, Kind
from validation.judging.ledger import NOWHERE, Heading, Ledger, Placing
from validation.judging.oracle import Subject
from validation.judging.verdict import Mismatch, Value, What, names_of
from validation.observers.observed import UNTOLD, Observed


class Conduct:
    """Enters into ``ledger`` how what was observed kept the laws about actions and parameters."""

    def __init__(self, subject: Subject, observed: Observed, ledger: Ledger) -> None:
        self._subject = subject
        self._observed = observed
        self._ledger = ledger
        self._place = Placing(observed.schedule.placement)
        self._counted: list[Mismatch] = []

    def orders(self, number: int, laws: frozenset[str], *, backward: bool) -> Mapping[int, Sequence[int]]:
        """The order of each stage's backwards, as it really was; in index order where it was no order of all."""
        every = list(range(self._subject.microbatches))
        ran: dict[What, dict[int, list[int]]] = {"forward": self._observed.forwards(number)}
        if backward:
            ran["backward"] = self._observed.backwards(number)
        for what, orders in ran.items():
            idle = self._subject.frozen if what == "backward" else ()
            for stage in sorted(orders.keys() - {*self._subject.unseen, *idle}):
                order = orders[stage]
                place = self._place.stage("microbatches", number, laws, stage)
                counted = stage not in self._subject.traced
                self._hold(place, _once_each(order, every), _told(order), tuple(every), what=what, counted=counted)
        self._calls(number, laws, training=backward)
        ordered = {stage: order for stage, order in self._observed.backwards(number).items() if sorted(order) == every}
        return {stage: every for stage, _ in self._subject.due} | ordered

    def _calls(self, number: int, laws: frozenset[str], *, training: bool) -> None:
        """Each stage's module itself ran once for each microbatch, in training mode or not as it must be."""
        calls = self._observed.called(number)
        for stage in sorted({*range(self._observed.schedule.n_stages)} - {*self._subject.uncalled}):
            place = self._place.stage("microbatches", number, laws, stage)
            seen = sorted(action.microbatch for action, _ in calls if action.stage == stage)
            every = tuple(range(self._subject.microbatches))
            self._hold(place, _once_each(seen, every), _told(seen), every, what="calls")
            if UNTOLD in seen:
                unknown = f"of {seen.count(UNTOLD)} calls of stage {stage} nothing tells the microbatch"
                self._ledger.remark("microbatches", f"{unknown}: they were counted alone")
            modes = {mode for action, mode in calls if action.stage == stage}
            wrong = modes - {training}
            wrong = wrong if wrong and self._subject.mode_matters() else set()
            self._hold(place, not wrong, not training, training, what="mode")

    def _hold(
        self, place: Heading, holds: bool, seen: Value, expected: Value, *, what: What, counted: bool = True
    ) -> None:
        """Enter what calls show; ``counted``: by hooks, which may miss a call, and see those of no training."""
        self._ledger.hold(place, holds, seen, expected, what=what)
        if counted and not holds:
            self._counted.append(self._ledger.mismatches[-1])

    def by_numbers(self, right: Collection[int]) -> None:
        """Let pass how often and in which mode the stages ran whose gradients are ``right``."""
        found = [mismatch for mismatch in self._counted if mismatch.stage in right]
        self._ledger.strike(found)
        for one in found:
            self._ledger.remark("microbatches", f"stage {one.stage}: {one.seen}, and its gradients are right")

    def parameters_once(self) -> None:
        """Every parameter that is due is held once, and nothing else is."""
        due, last = self._subject.due, len(self._subject.plan) - 1
        for site, why in sorted(self._subject.strangers.items()):
            place = self._place.site("parameters-once", last, frozenset(), site)
            self._ledger.hold(place, False, why, "a parameter of the reference")
        seen = self._observed.held(last)
        for site in sorted(due | set(seen)):
            stage = None if site[0] == NOWHERE else site[0]
            place = Heading.at("parameters-once", last, frozenset(), stage=stage, parameter=site[1])
            count = seen.count(site)
            self._ledger.hold(place, count == (site in due), count, int(site in due), what="held")
        lost = [name for stage, name in sorted(due) if stage == NOWHERE]
        for what, names in (("unknown", [name for _, name in sorted(self._subject.strangers)]), ("held by none", lost)):
            if names:
                self._ledger.remark("parameters-once", f"{what}: {names_of(names)}")

    def uncompared(self, number: int) -> None:
        """Say how much at the boundaries was not compared: beside gradients that are wrong, that may hide the fault."""
        count = self._observed.uncompared(number)
        note = f"{count} tensors were not compared: their content is at no place in the reference"
        if count and any(m.law in ("gradient", "none-ness") for m in self._ledger.mismatches):
            self._ledger.doubt("boundaries", note)
        elif count:
            self._ledger.remark("boundaries", note)

    def claims(self, number: int, laws: frozenset[str]) -> None:
        """What must hold between ranks that have a stage in common."""
        for rank in self._observed.ranks:
            for claim in rank[number].claims:
                stage, name = claim.site
                place = Heading.at(claim.law, number, laws, rank=claim.rank, stage=stage, parameter=name)
                self._ledger.hold(place, claim.holds, claim.seen, claim.expected)

    def crossings(self, number: int, laws: frozenset[str]) -> None:
        """What passed the boundaries of stages, along the flow of data: the first to differ is nearest to the fault."""
        crossings = [crossing for crossing in self._observed.crossings(number) if crossing.judged]
        for crossing in sorted(crossings, key=lambda one: _flow(one.action, self._observed.schedule.n_stages)):
            stage, _, microbatch = crossing.action
            known = None if microbatch == UNTOLD else microbatch
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
    known = [microbatch for microbatch in order if microbatch != UNTOLD]
    return len(order) == len(every) and len(set(known)) == len(known) and set(known) <= set(every)


def _told(order: Sequence[int]) -> tuple[int | None, ...]:
    return tuple(None if microbatch == UNTOLD else microbatch for microbatch in order)


def _flow(action: Action, n_stages: int) -> tuple[bool, int, int]:
    """Where ``action`` comes in the flow of data: forwards down the stages, then backwards up."""
    forward = action.kind is Kind.FORWARD
    return not forward, action.stage if forward else n_stages - action.stage, action.microbatch
