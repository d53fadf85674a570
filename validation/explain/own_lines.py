"""The user's code lines behind a cause."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from pipeproof.core.cause import Cause, OwnLine
from pipeproof.core.observe.observed import Passed
from pipeproof.core.observe.posted_messages import Came
from pipeproof.core.observe.recording import GIVEN, KEPT, RECEIVED
from pipeproof.core.observe.stack import Line, Stack
from pipeproof.explain.evidence import Evidence
from pipeproof.pipeline.action import Action, ActionError, Kind
from pipeproof.pipeline.sizes import SHOWN

# Actions behind kinds of causes that name none.
_PAIRED = frozenset({"swapped-activations", "swapped-gradients", "mispaired"})
_LOST = frozenset({"zero", "missing"})
_SUMMED = frozenset({"dropped", "doubled"}) | _LOST
_LOSS = frozenset({"scale", "sign", "unequal-weights"})  # where no stage is named
_FORWARDS = frozenset({"computation", "mode", "randomness", "swapped-data"})
_MESSAGES = frozenset({"wrong-message", "uninitialised", "rounded", "altered", "not-finite", "stale-tensor"})
_STACK = 2  # lines of one stack

Ran = tuple[str, Stack]  # the action, and its stack


def with_lines(cause: Cause, evidence: Evidence, *, or_message: bool = False) -> Cause:
    """Add the user's code lines to ``cause``, if observed.

    ``or_message``: a message that arrived as another is an alternative.
    """
    if cause.earlier:
        return cause  # observations concern the step itself
    about = _About(cause, evidence, or_message)
    return replace(cause, lines=tuple(islice(_once(about.runs()), SHOWN)))


def _once(ran: Iterable[Ran]) -> Iterator[OwnLine]:
    """Yield each line once, after its callee."""
    shown: set[Line] = set()
    for what, stack in ran:
        for k, line in enumerate(stack[:_STACK]):
            if line in shown:
                break
            shown.add(line)
            yield OwnLine("from" if k else what, line)


@dataclass(frozen=True)
class _About:
    """Observed lines for the actions behind ``cause``."""

    cause: Cause
    evidence: Evidence
    or_message: bool

    def runs(self) -> Iterator[Ran]:
        """Actions and their stacks, most useful first."""
        kind, action = self.cause.kind, self._action
        if action is None:
            return
        if kind in _SUMMED:
            yield "cleared", self._passed_at(action).cleared.get(action.microbatch, ())
        if kind in _LOST:
            action = None if self.cause.parameter else action._replace(kind=Kind.FORWARD)
        elif self.cause.cut:
            action = action._replace(kind=Kind.FORWARD)
        elif kind == "overwritten" or self._message_may_be_wrong:
            yield from self._message(action)
        elif kind == "dropped" and not self._stack(action):
            others = (one for one in reversed(self._passed_at(action).actions) if one.kind is Kind.BACKWARD)
            for last in islice(others, 1):
                yield f"last {last}", self._stack(last)
        if action is not None:
            yield str(action), self._stack(action)

    @property
    def _message_may_be_wrong(self) -> bool:
        """True if the message may be wrong, rather than mistaken for another."""
        if self.cause.action is None:
            return False
        return self.cause.kind in _MESSAGES | _LOSS or (self.cause.kind in _PAIRED and self.or_message)

    @cached_property
    def _action(self) -> Action | None:
        """The named action, as a module's forward or backward; or the first suitable action."""
        cause = self.cause
        if cause.action is not None:
            try:
                action = Action.parse(cause.action)
            except ActionError:  # a call of an unknown microbatch
                return None
            forward = action.kind in (Kind.FORWARD, Kind.SEND_F, Kind.RECV_F)
            return action._replace(kind=Kind.FORWARD if forward else Kind.BACKWARD)
        stage = cause.stage if cause.stage is not None else min(cause.stages, default=None)
        where = cause.stages or (range(self.evidence.stages) if stage is None else (stage,))
        if cause.kind in _LOSS and (cause.parameter or self.evidence.is_flow_right(where, cause.factor)):
            return None  # it came after the backwards
        microbatch = min(cause.microbatches, default=0)
        if cause.kind in _LOSS | _SUMMED:
            return Action(self.evidence.stages - 1 if stage is None else stage, Kind.BACKWARD, microbatch)
        if cause.kind in _FORWARDS:
            met = cause.kind == "swapped-data" and self._came_in_right(microbatch)  # so it is the target that is not
            first = self.evidence.stages - 1 if met else 0
            return Action(first if stage is None else stage, Kind.FORWARD, microbatch)
        if stage is None or not cause.microbatches or cause.kind not in _MESSAGES | _PAIRED:
            return None
        return Action(stage, Kind.BACKWARD if cause.kind in _PAIRED else Kind.FORWARD, microbatch)

    def _came_in_right(self, microbatch: int) -> bool:
        """True if the first stage received the right input for a microbatch, if observed."""
        passed = self._passed_at(Action(0, Kind.FORWARD, microbatch))
        given = [one for one in passed.crossings if (one.where, one.action.microbatch) == (GIVEN, microbatch)]
        return bool(given) and all(one.same for one in given)

    def _passed_at(self, action: Action) -> Passed:
        return self.evidence.passed.get(action.stage, Passed((), (), ()))

    def _stack(self, action: Action) -> Stack:
        return self._passed_at(action).stacks.get(action, ())

    def _message(self, action: Action) -> Iterator[Ran]:
        """Stacks for the message's send, unless only the buffer went wrong, and for its receive."""
        for one in self._came(action):
            if one.message is not None and one.sent is not None and self.cause.kind != "overwritten":
                yield f"sent by rank {one.message.sender}", one.sent.stack
            yield "received", one.received

    def _came(self, action: Action) -> Sequence[Came]:
        """The message to ``action``; the first wrong message among several. Empty without any."""
        wheres = {RECEIVED}
        if action.kind is Kind.FORWARD or self.cause.kind == "overwritten":
            action, wheres = action._replace(kind=Kind.FORWARD), {GIVEN, KEPT}
        passed, came = self._passed_at(action), self._passed_at(action).came.get(action, {})
        crossings = (one for one in passed.crossings if one.where in wheres and not one.same)
        wrong = {one.number for one in crossings if one.action.microbatch == action.microbatch}
        return [came[number] for number in sorted(came) if number in wrong or not wrong][:1]
