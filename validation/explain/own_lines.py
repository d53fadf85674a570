"""The user's code lines behind a cause."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from pipeproof.core.cause import Cause, OwnLine
from pipeproof.core.observe.observed import Passed
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


def with_lines(cause: Cause, evidence: Evidence, *, or_message: bool = False) -> Cause:
    """Add the user's code lines to ``cause``, if observed, each once, after its callee.

    ``or_message``: a message that arrived as another is an alternative.
    """
    if cause.earlier:
        return cause  # observations concern the step itself
    action = _action(cause, evidence)
    lines: dict[Line, OwnLine] = {}
    for what, stack in () if action is None else _runs(cause, action, evidence, or_message=or_message):
        for k, line in enumerate(stack[:_STACK]):
            if line in lines:
                break
            lines[line] = OwnLine("from" if k else what, line)
    return replace(cause, lines=tuple(lines.values())[:SHOWN])


def _runs(cause: Cause, action: Action, evidence: Evidence, *, or_message: bool) -> Iterator[tuple[str, Stack]]:
    """Actions and their stacks, most useful first."""
    kind, passed = cause.kind, evidence.passed.get(action.stage, Passed((), (), ()))
    # A message may be wrong, rather than mistaken for another.
    wrong_message = kind in _MESSAGES | _LOSS or (kind in _PAIRED and or_message)
    if kind in _SUMMED:
        yield "cleared", passed.cleared.get(action.microbatch, ())
    if kind in _LOST:
        if cause.parameter:
            return
        action = action._replace(kind=Kind.FORWARD)
    elif cause.cut:
        action = action._replace(kind=Kind.FORWARD)
    elif kind == "overwritten" or (wrong_message and cause.action is not None):
        yield from _message(cause, action, passed)
    elif kind == "dropped" and not passed.stacks.get(action):
        others = (one for one in reversed(passed.actions) if one.kind is Kind.BACKWARD)
        for last in islice(others, 1):
            yield f"last {last}", passed.stacks.get(last, ())
    yield str(action), passed.stacks.get(action, ())


def _action(cause: Cause, evidence: Evidence) -> Action | None:
    """The named action, as a module's forward or backward; or the first suitable action."""
    if cause.action is not None:
        try:
            action = Action.parse(cause.action)
        except ActionError:  # a call of an unknown microbatch
            return None
        forward = action.kind in (Kind.FORWARD, Kind.SEND_F, Kind.RECV_F)
        return action._replace(kind=Kind.FORWARD if forward else Kind.BACKWARD)
    stage = cause.stage if cause.stage is not None else min(cause.stages, default=None)
    where = cause.stages or (range(evidence.stages) if stage is None else (stage,))
    if cause.kind in _LOSS and (cause.parameter or evidence.is_flow_right(where, cause.factor)):
        return None  # it came after the backwards
    microbatch, last = min(cause.microbatches, default=0), evidence.stages - 1
    if cause.kind in _LOSS | _SUMMED:
        return Action(last if stage is None else stage, Kind.BACKWARD, microbatch)
    if cause.kind in _FORWARDS:
        crossings = evidence.passed.get(0, Passed((), (), ())).crossings
        given = [one for one in crossings if (one.where, one.action.microbatch) == (GIVEN, microbatch)]
        met = cause.kind == "swapped-data" and bool(given) and all(one.same for one in given)  # the target is not
        return Action((last if met else 0) if stage is None else stage, Kind.FORWARD, microbatch)
    if stage is None or not cause.microbatches or cause.kind not in _MESSAGES | _PAIRED:
        return None
    return Action(stage, Kind.BACKWARD if cause.kind in _PAIRED else Kind.FORWARD, microbatch)


def _message(cause: Cause, action: Action, passed: Passed) -> Iterator[tuple[str, Stack]]:
    """Stacks for the first wrong message to ``action``: its send, unless the buffer alone went wrong, and receive."""
    kept, wheres = cause.kind == "overwritten", {RECEIVED}
    if action.kind is Kind.FORWARD or kept:
        action, wheres = action._replace(kind=Kind.FORWARD), {GIVEN, KEPT}
    came = passed.came.get(action, {})
    crossings = (one for one in passed.crossings if one.where in wheres and not one.same)
    wrong = {one.number for one in crossings if one.action.microbatch == action.microbatch}
    for one in [came[number] for number in sorted(came) if number in wrong or not wrong][:1]:
        if one.message is not None and one.sent is not None and not kept:
            yield f"sent by rank {one.message.sender}", one.sent.stack
        yield "received", one.received
