"""Check actions and parameters against their laws."""

from collections.abc import Collection, Mapping, Sequence

from pipeproof.core.ledger import NOWHERE, Heading, Ledger
from pipeproof.core.observe.observed import UNKNOWN_MICROBATCH, Crossing, Observed
from pipeproof.core.observe.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from pipeproof.core.oracle import Conditions
from pipeproof.core.verdict import What
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.sizes import first_few
from pipeproof.reference.step import Site

_IN_ACTION = (GIVEN, MADE, KEPT, RECEIVED, HANDED_ON)  # order within an action


class Headings:
    """Builds ledger headings. ``placement``: each stage's rank."""

    def __init__(self, placement: Sequence[int]) -> None:
        self._placement = tuple(placement)

    def stage(self, law: str, number: int, scenarios: frozenset[str], stage: int, **where: object) -> Heading:
        """Return a heading at ``stage``, possibly nowhere, with its rank."""
        if stage == NOWHERE:
            return Heading.at(law, number, scenarios, **where)
        return Heading.at(law, number, scenarios, **{"rank": self._placement[stage], **where}, stage=stage)

    def site(self, law: str, number: int, scenarios: frozenset[str], site: Site) -> Heading:
        """Return a heading at a parameter."""
        return self.stage(law, number, scenarios, site[0], parameter=site[1])


class Execution:
    """Enters laws about actions and parameters into ``ledger``."""

    def __init__(self, required: Conditions, observed: Observed, ledger: Ledger) -> None:
        self._required = required
        self._observed = observed
        self._ledger = ledger
        self._place = Headings(observed.schedule.placement)

    def orders(self, number: int, laws: frozenset[str], *, backward: bool) -> Mapping[int, Sequence[int]]:
        """Return each stage's actual backward order, or index order if incomplete."""
        every = list(range(self._required.counts[number]))
        for line in range(1 + len(self._observed.copies)):
            self._judge_order(number, laws, line, backward=backward)
            self._calls(number, laws, line, training=backward)
        ran = {stage: _last_of_each(order) for stage, order in self._observed.backwards(number).items()}
        ordered = {stage: order for stage, order in ran.items() if sorted(order) == every}
        return {stage: every for stage, _ in self._required.expected} | ordered

    def _judge_order(self, number: int, laws: frozenset[str], line: int, *, backward: bool) -> None:
        """Check one forward and one backward per stage and microbatch."""
        every = list(range(self._required.counts[number]))
        ran: dict[What, dict[int, list[int]]] = {"forward": self._observed.forwards(number, line)}
        if backward:
            ran["backward"] = self._observed.backwards(number, line)
        for what, orders in ran.items():
            idle = self._required.frozen if what == "backward" else ()
            for stage in self._stages(line, but={*self._required.unseen, *idle}):
                order, place = orders[stage], self._of_stage(number, laws, stage, line)
                left = {*self._required.weightless} - {*order} if what == "backward" else set[int]()
                expected = [microbatch for microbatch in every if microbatch not in left]
                self._ledger.hold(place, _once_each(order, expected), _known_order(order), tuple(expected), what=what)

    def _calls(self, number: int, laws: frozenset[str], line: int, *, training: bool) -> None:
        """Check one module call per stage and microbatch, in the right training mode."""
        calls = self._observed.calls(number, line)
        for stage in self._stages(line, but=self._required.uncalled):
            place = self._of_stage(number, laws, stage, line)
            observed = sorted(action.microbatch for action, _ in calls if action.stage == stage)
            every = tuple(range(self._required.counts[number]))
            self._ledger.hold(place, _once_each(observed, every), _known_order(observed), every, what="calls")
            if UNKNOWN_MICROBATCH in observed:
                unknown = f"of {observed.count(UNKNOWN_MICROBATCH)} calls of stage {stage} nothing tells the microbatch"
                self._ledger.remark("microbatches", f"{unknown}: they were counted alone")
            modes = {mode for action, mode in calls if action.stage == stage}
            wrong = modes - {training}
            wrong = wrong if wrong and self._required.mode_matters() else set()
            self._ledger.hold(place, not wrong, not training, training, what="mode")

    def _stages(self, line: int, but: Collection[int]) -> list[int]:
        """Return stages with known actions on ``line``."""
        there = self._observed.copies[line - 1] if line else range(self._observed.schedule.n_stages)
        return sorted({*there} - {*but})

    def _of_stage(self, number: int, laws: frozenset[str], stage: int, line: int) -> Heading:
        own = {"rank": self._observed.copies[line - 1][stage]} if line else {}
        return self._place.stage("microbatches", number, laws, stage, **own)

    def parameters_once(self) -> None:
        """Check that each expected parameter exists once, without extra ones."""
        expected, last = (
            self._required.expected,
            max(k for k, name in enumerate(self._required.plan) if name == "train"),
        )
        for site, why in sorted(self._required.unmatched.items()):
            place = self._place.site("parameters-once", last, frozenset(), site)
            self._ledger.hold(place, False, why, "a parameter of the reference")
        observed = self._observed.gradient_sites(last)
        for site in sorted(expected | set(observed)):
            stage = None if site[0] == NOWHERE else site[0]
            place = Heading.at("parameters-once", last, frozenset(), stage=stage, parameter=site[1])
            count = observed.count(site)
            self._ledger.hold(place, count == (site in expected), count, int(site in expected), what="held")
        lost = [name for stage, name in sorted(expected) if stage == NOWHERE]
        for what, names in (
            ("unknown", [name for _, name in sorted(self._required.unmatched)]),
            ("held by none", lost),
        ):
            if names:
                self._ledger.remark("parameters-once", f"{what}: {first_few(names)}")

    def extra_calls(self, number: int, *, doubtful: bool) -> None:
        """Report calls beyond the microbatches. ``doubtful``: they may have added to wrong gradients."""
        for stage, (count, adding) in (one for rank in self._observed.ranks for one in rank[number].extra.items()):
            calls = f"{count} call{'s' * (count > 1)} of stage {stage} beside those of microbatches"
            (self._ledger.doubt if doubtful and adding else self._ledger.remark)("microbatches", calls)

    def report_uncompared(self, number: int, *, doubtful: bool) -> None:
        """Report uncompared boundary tensors. ``doubtful``: they may hide the fault."""
        if count := self._observed.count_uncompared(number):
            note = f"{count} tensors match no tensor of the reference and were not compared"
            (self._ledger.doubt if doubtful else self._ledger.remark)("boundaries", note)

    def crossings(self, number: int, laws: frozenset[str]) -> None:
        """Compare boundary tensors along the data flow: the first mismatch lies nearest to the fault."""
        crossings = [crossing for crossing in self._observed.crossings(number) if crossing.judged]
        for crossing in sorted(crossings, key=lambda one: flow(one, self._observed.schedule.n_stages)):
            stage, _, microbatch = crossing.action
            known = None if microbatch == UNKNOWN_MICROBATCH else microbatch
            own = {} if crossing.rank is None else {"rank": crossing.rank}
            place = self._place.stage("boundaries", number, laws, stage, microbatch=known, action=crossing.at, **own)
            observed, expected = (
                f"{crossing.what}: {crossing.observed}",
                f"microbatch {'?' if known is None else known}'s",
            )
            self._ledger.hold(place, crossing.same, observed, expected, exact=crossing.exact)

    def count_reshaped(self, number: int) -> None:
        """List boundary tensors that arrived in another shape: possibly on purpose."""
        crossings = [
            crossing for crossing in self._observed.crossings(number) if not (crossing.judged or crossing.same)
        ]
        names = [f"{crossing.what} of {crossing.at}" for crossing in crossings]
        self._ledger.leave_out("boundaries", names, "of another shape than was sent, and not compared")


def _last_of_each(order: Sequence[int]) -> list[int]:
    """Keep each number's last occurrence: earlier gradients may have been cleared."""
    return list(dict.fromkeys(reversed(order)))[::-1]


def _once_each(order: Sequence[int], every: Sequence[int]) -> bool:
    """True if each microbatch appears once, counting unknown calls as missing ones."""
    known = [microbatch for microbatch in order if microbatch != UNKNOWN_MICROBATCH]
    return len(order) == len(every) and len(set(known)) == len(known) and set(known) <= set(every)


def _known_order(order: Sequence[int]) -> tuple[int | None, ...]:
    return tuple(None if microbatch == UNKNOWN_MICROBATCH else microbatch for microbatch in order)


def flow(crossing: Crossing, n_stages: int) -> tuple[bool, int, int, int]:
    """Return a sort key along the data flow: forwards down the stages, then backwards up."""
    action = crossing.action
    forward = action.kind is Kind.FORWARD
    after = _IN_ACTION.index(crossing.where) if crossing.where in _IN_ACTION else 0
    return not forward, action.stage if forward else n_stages - action.stage, action.microbatch, after
