"""Check actions and parameters against their laws."""

from collections.abc import Mapping, Sequence

from pipeproof.core.ledger import NOWHERE, Ledger, Where
from pipeproof.core.mismatch import Mismatch
from pipeproof.core.observe.observed import UNKNOWN_MICROBATCH, Crossing, Observed
from pipeproof.core.observe.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from pipeproof.core.oracle import Conditions
from pipeproof.core.verdict import What
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.sizes import first_few

_IN_ACTION = (GIVEN, MADE, KEPT, RECEIVED, HANDED_ON)  # order within an action


class Execution:
    """Enters laws about actions and parameters into ``ledger``."""

    def __init__(self, required: Conditions, observed: Observed, ledger: Ledger) -> None:
        self._required = required
        self._observed = observed
        self._ledger = ledger

    def orders(self, number: int, *, backward: bool) -> Mapping[int, Sequence[int]]:
        """Check all actions. Return each stage's actual backward order, or index order if incomplete."""
        every = list(range(self._required.counts[number]))
        for line in range(1 + len(self._observed.copies)):
            self._judge_line(number, line, training=backward)
        # The last of each counts: earlier gradients may have been cleared.
        rows = self._observed.backwards(number).items()
        ran = {stage: list(dict.fromkeys(reversed(order)))[::-1] for stage, order in rows}
        ordered = {stage: order for stage, order in ran.items() if sorted(order) == every}
        return {stage: every for stage, _ in self._required.expected} | ordered

    def _judge_line(self, number: int, line: int, *, training: bool) -> None:
        """Check one forward, backward and module call per stage and microbatch, in the right training mode."""
        required, observed, hold = self._required, self._observed, self._ledger.hold
        every, calls = range(required.counts[number]), observed.calls(number, line)
        copies: Mapping[int, int] = observed.copies[line - 1] if line else {}
        there = {*copies} if line else {*range(observed.schedule.n_stages)}

        def place(stage: int) -> Mismatch:
            rank = copies[stage] if line else observed.schedule.placement[stage]
            return Mismatch("microbatches", number + 1, stage=stage, rank=rank)

        ran: dict[What, dict[int, list[int]]] = {"forward": observed.forwards(number, line)}
        if training:
            ran["backward"] = observed.backwards(number, line)
        for what, orders in ran.items():
            for stage in sorted(there - {*required.unseen, *(required.frozen if what == "backward" else ())}):
                order = orders[stage]
                left = {*required.weightless} - {*order} if what == "backward" else set[int]()
                expected = tuple(microbatch for microbatch in every if microbatch not in left)
                hold(place(stage), _once_each(order, expected), _known_order(order), expected, what=what)
        for stage in sorted(there - {*required.uncalled}):
            called = sorted(action.microbatch for action, _ in calls if action.stage == stage)
            hold(place(stage), _once_each(called, every), _known_order(called), tuple(every), what="calls")
            if UNKNOWN_MICROBATCH in called:
                unknown = f"of {called.count(UNKNOWN_MICROBATCH)} calls of stage {stage} nothing tells the microbatch"
                self._ledger.remark("microbatches", f"{unknown}: they were counted alone")
            wrong = any(mode != training for action, mode in calls if action.stage == stage)
            hold(place(stage), not (wrong and required.mode_matters()), not training, training, what="mode")

    def parameters_once(self) -> None:
        """Check that each expected parameter exists once, without extra ones."""
        expected, names = self._required.expected, {"unknown": list[str](), "held by none": list[str]()}
        last = max(k for k, name in enumerate(self._required.plan) if name == "train")
        for site, why in sorted(self._required.unmatched.items()):
            place = Mismatch("parameters-once", last + 1, parameter=site[1], **where_of(self._observed, site[0]))
            self._ledger.hold(place, False, why, "a parameter of the reference")
            names["unknown"].append(site[1])
        observed = self._observed.gradient_sites(last)
        for site in sorted(expected | set(observed)):
            stage = None if site[0] == NOWHERE else site[0]
            place = Mismatch("parameters-once", last + 1, stage=stage, parameter=site[1])
            count = observed.count(site)
            self._ledger.hold(place, count == (site in expected), count, int(site in expected), what="held")
            if stage is None and site in expected:
                names["held by none"].append(site[1])
        for what, some in names.items():
            if some:
                self._ledger.remark("parameters-once", f"{what}: {first_few(some)}")

    def report_uncompared(self, number: int, *, doubtful: bool) -> None:
        """Report calls beyond the microbatches, and uncompared boundary tensors.

        doubtful: gradients are wrong, so that these calls may have added to them, and such tensors may hide the fault.
        """
        for stage, (count, adding) in (one for rank in self._observed.ranks for one in rank[number].extra.items()):
            calls = f"{count} call{'s' * (count > 1)} of stage {stage} beside those of microbatches"
            (self._ledger.doubt if doubtful and adding else self._ledger.remark)("microbatches", calls)
        if count := self._observed.count_uncompared(number):
            note = f"{count} tensors match no tensor of the reference and were not compared"
            (self._ledger.doubt if doubtful else self._ledger.remark)("boundaries", note)

    def crossings(self, number: int) -> None:
        """Compare boundary tensors along the data flow: the first mismatch lies nearest to the fault."""
        crossings = [crossing for crossing in self._observed.crossings(number) if crossing.judged]
        for crossing in sorted(crossings, key=lambda one: flow(one, self._observed.schedule.n_stages)):
            stage, _, microbatch = crossing.action
            known = None if microbatch == UNKNOWN_MICROBATCH else microbatch
            rank = self._observed.schedule.placement[stage] if crossing.rank is None else crossing.rank
            place = Mismatch("boundaries", number + 1, rank=rank, stage=stage, microbatch=known, action=crossing.at)
            expected = f"microbatch {'?' if known is None else known}'s"
            observed = f"{crossing.what}: {crossing.observed}"
            self._ledger.hold(place, crossing.same, observed, expected, exact=crossing.exact)

    def count_reshaped(self, number: int) -> None:
        """List boundary tensors that arrived in another shape: possibly on purpose."""
        crossings = self._observed.crossings(number)
        names = [f"{one.what} of {one.at}" for one in crossings if not (one.judged or one.same)]
        self._ledger.leave_out("boundaries", names, "of another shape than was sent, and not compared")


def _once_each(order: Sequence[int], every: Sequence[int]) -> bool:
    """True if each microbatch appears once, counting unknown calls as missing ones."""
    known = [microbatch for microbatch in order if microbatch != UNKNOWN_MICROBATCH]
    return len(order) == len(every) and len(set(known)) == len(known) and set(known) <= set(every)


def _known_order(order: Sequence[int]) -> tuple[int | None, ...]:
    return tuple(None if microbatch == UNKNOWN_MICROBATCH else microbatch for microbatch in order)


def where_of(observed: Observed, stage: int) -> Where:
    """Return a stage, possibly nowhere, with its rank."""
    return {} if stage == NOWHERE else {"rank": observed.schedule.placement[stage], "stage": stage}


def flow(crossing: Crossing, n_stages: int) -> tuple[bool, int, int, int]:
    """Return a sort key along the data flow: forwards down the stages, then backwards up."""
    action = crossing.action
    forward = action.kind is Kind.FORWARD
    after = _IN_ACTION.index(crossing.where) if crossing.where in _IN_ACTION else 0
    return not forward, action.stage if forward else n_stages - action.stage, action.microbatch, after
