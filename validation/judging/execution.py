"""What was held and what ran, before any number is compared: parameters, microbatches and what crossed boundaries."""

from collections.abc import Mapping, Sequence

from pipeline.action import Action, Kind
from validation.judging.headings import NOWHERE, Placing
from validation.judging.ledger import Ledger
from validation.judging.requirements import Subject
from validation.observers.observed import UNTOLD, Observed

_LISTED = 12  # names in a note


class Conduct:
    """Enters into ``ledger`` how what was observed kept the laws about actions and parameters."""

    def __init__(self, subject: Subject, observed: Observed, ledger: Ledger) -> None:
        self._subject = subject
        self._observed = observed
        self._ledger = ledger
        self._place = Placing(observed.schedule.placement)

    def orders(self, number: int, laws: frozenset[str], *, backward: bool) -> Mapping[int, Sequence[int]]:
        """The order of each stage's backwards, as it really was; in index order where it was no order of all."""
        every = list(range(self._subject.microbatches))
        ran = {"forward": self._observed.forwards(number)}
        if backward:
            ran["backward"] = self._observed.backwards(number)
        for what, orders in ran.items():
            for stage in sorted(orders.keys() - self._subject.unseen):
                order = orders[stage]
                place = self._place.stage("microbatches", number, laws, stage)
                seen = f"{what} of {_told(order)}"
                self._ledger.hold(place, _once_each(order, every), seen, f"{what} of each of {every} once")
        self._calls(number, laws, training=backward)
        ordered = {stage: order for stage, order in self._observed.backwards(number).items() if sorted(order) == every}
        return {stage: every for stage, _ in self._subject.due} | ordered

    def _calls(self, number: int, laws: frozenset[str], *, training: bool) -> None:
        """Each stage's module itself ran once for each microbatch, in training mode or not as it must be."""
        calls = self._observed.called(number)
        for stage in sorted({*range(self._observed.schedule.n_stages)} - {*self._subject.uncalled}):
            place = self._place.stage("microbatches", number, laws, stage)
            seen = sorted(action.microbatch for action, _ in calls if action.stage == stage)
            every = list(range(self._subject.microbatches))
            ran = f"its module ran for {_told(seen)}"
            self._ledger.hold(place, _once_each(seen, every), ran, f"once for each of {every}")
            if UNTOLD in seen:
                unknown = f"of {seen.count(UNTOLD)} calls of stage {stage} nothing tells the microbatch"
                self._ledger.remark("microbatches", f"{unknown}: they were counted alone")
            modes = {mode for action, mode in calls if action.stage == stage}
            named = {True: "training", False: "evaluation"}
            wrong = modes - {training}
            self._ledger.hold(place, not wrong, f"{named[not training]} mode", f"{named[training]} mode")

    def parameters_once(self) -> None:
        """Every parameter that is due is held once, and nothing else is."""
        due, last = self._subject.due, len(self._subject.plan) - 1
        for site, why in sorted(self._subject.strangers.items()):
            place = self._place.site("parameters-once", last, frozenset(), site)
            self._ledger.hold(place, False, why, "a parameter of the reference")
        seen = self._observed.held(last)
        for site in sorted(due | set(seen)):
            stage = None if site[0] == NOWHERE else site[0]
            place = self._place.at("parameters-once", last, frozenset(), stage=stage, parameter=site[1])
            count = seen.count(site)
            self._ledger.hold(place, count == (site in due), f"held {count} times", f"held {int(site in due)} times")
        lost = [name for stage, name in sorted(due) if stage == NOWHERE]
        for what, names in (("unknown", [name for _, name in sorted(self._subject.strangers)]), ("held by none", lost)):
            if names:
                self._ledger.remark("parameters-once", f"{what}: {_listed(names)}")

    def claims(self, number: int, laws: frozenset[str]) -> None:
        """What must hold between ranks that have a stage in common."""
        for rank in self._observed.ranks:
            for claim in rank[number].claims:
                stage, name = claim.site
                place = self._place.at(claim.law, number, laws, rank=claim.rank, stage=stage, parameter=name)
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


def _once_each(order: Sequence[int], every: Sequence[int]) -> bool:
    """Whether ``order`` has each microbatch once, where calls of which nothing tells it may be those that are left."""
    known = [microbatch for microbatch in order if microbatch != UNTOLD]
    return len(order) == len(every) and len(set(known)) == len(known) and set(known) <= set(every)


def _told(order: Sequence[int]) -> str:
    return f"[{', '.join('?' if microbatch == UNTOLD else str(microbatch) for microbatch in order)}]"


def _flow(action: Action, n_stages: int) -> tuple[bool, int, int]:
    """Where ``action`` comes in the flow of data: forwards down the stages, then backwards up."""
    forward = action.kind is Kind.FORWARD
    return not forward, action.stage if forward else n_stages - action.stage, action.microbatch


def _listed(names: Sequence[str]) -> str:
    """The first of ``names``, and how many more there are."""
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
