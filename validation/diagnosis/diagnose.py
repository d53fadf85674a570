"""From what disagrees to the fault that explains it.

Evidence is followed along the way that a gradient takes: the order of actions, the tensors at the boundaries, each
microbatch's addition to the sums, the reduction of tied parameters, the norm, the clipping, the update, the report. The
first link that broke is the cause; what comes after it is consequence, and the sound links before it are ruled out.
Where nothing was recorded, what the final gradients are made of stands for the links that only a recording shows.
"""

from collections.abc import Callable, Sequence

from validation.diagnosis.evidence import Evidence
from validation.diagnosis.rule import Rule, clears, followed
from validation.diagnosis.rules.attributed import attributed
from validation.diagnosis.rules.boundaries import boundaries
from validation.diagnosis.rules.laws import buffers, calls, partition, weights
from validation.diagnosis.rules.norm import norm
from validation.diagnosis.rules.reduction import reduction
from validation.diagnosis.rules.report import report
from validation.diagnosis.rules.sums import sums
from validation.diagnosis.rules.update import clip, update
from validation.diagnosis.setup import Setup
from validation.judging.cause import RuledOut
from validation.judging.judge import one_thread
from validation.judging.verdict import Crash, Verdict
from validation.observers.observed import Observed
from validation.observers.recording import LATE


def diagnose(setup: Setup, observed: Observed, verdict: Verdict) -> Verdict:
    """``verdict`` with its causes, the likeliest first; none where the evidence does not decide."""
    if verdict.verdict == "pass" or not verdict.mismatches:
        return verdict
    with one_thread():
        return followed(Evidence(setup, observed, verdict), RULES)


def sought(verdict: Verdict, look: Callable[[], Verdict]) -> Verdict:
    """``look()``, which is ``verdict`` with its causes; where looking raises, the same verdict with a note of that.

    A verdict never depends on its explanation, in which code of the user's own may run.
    """
    try:
        return look()
    except Exception as error:  # no one type: a rule of ours may be wrong, and so may a model
        return verdict.without_cause(Crash.of(error))


def _watched(evidence: Evidence) -> bool:
    return evidence.observed.watched


def _recorded(evidence: Evidence) -> bool:
    return evidence.recording is not None


def _unrecorded(evidence: Evidence) -> bool:
    return evidence.recording is None


def _began(evidence: Evidence) -> RuledOut | None:
    """Every parameter was recorded as the operation began, and is the model's."""
    if evidence.recording is None or not evidence.recording.parameters.keys() >= evidence.expected.gradients.keys():
        return None
    return RuledOut((), "every stage began with the model's parameters", len(evidence.recording.parameters))


def _crossed(evidence: Evidence) -> RuledOut | None:
    """Every boundary tensor was recorded, and is the reference's."""
    due, recording = set(evidence.played[evidence.number].tensors()), evidence.recording
    if recording is None:
        return None
    if not any(point.where == LATE for point in recording.tensors):  # no backward was split
        due = {point for point in due if point.where != LATE}
    if not recording.tensors.keys() >= due:
        return None
    return RuledOut(("wrong-message", "swapped-data"), "every boundary tensor is right", len(due))


def _added(evidence: Evidence) -> RuledOut | None:
    """Every action's addition was recorded, and is what its microbatch contributes."""
    recording, number = evidence.recording, evidence.stages * evidence.microbatches
    added = 0 if recording is None else sum(map(len, recording.additions.values()))
    if added < number or evidence.broken_sums or evidence.operation == "eval":
        return None
    return RuledOut(("dropped", "doubled"), "each action added what its microbatch contributes", added)


def _left(evidence: Evidence) -> Sequence[str]:
    return evidence.unexplained


def _beside(evidence: Evidence) -> Sequence[RuledOut]:
    found = evidence.attribution
    return found.ruled_out if found is not None and found.causes else ()


def _attributed(needs: Callable[[Evidence], bool]) -> Rule[Evidence]:
    whole = clears("gradient", ("scale", "sign", "dropped", "doubled"), "every gradient is what it should be")
    return Rule(attributed, whole, needs, left=_left, beside=_beside)


# In the order of the flow. Attribution stands for the links that only a recording shows.
RULES: tuple[Rule[Evidence], ...] = (
    Rule(partition, clears("parameters-once", (), "every parameter is in the stage that should hold it")),
    Rule(
        calls,
        clears("microbatches", ("order", "mode"), "every stage ran once each way for each microbatch, in its mode"),
        _watched,
    ),
    Rule(weights, _began),
    Rule(boundaries, _crossed, _recorded),
    Rule(sums, _added, _recorded),
    Rule(
        reduction,
        clears("tied-copies", ("tied-not-summed", "tied-doubled"), "every copy has the sum of all shares"),
        _recorded,
    ),
    _attributed(_unrecorded),
    Rule(norm, clears("grad-norm", ("norm",), "the norm is that of the gradients")),
    Rule(clip, clears("updated-parameters", ("clip",), "all gradients were multiplied alike")),
    Rule(update, clears("updated-parameters", ("update",), "the optimizer did what it should")),
    Rule(buffers, clears("buffers", ("buffers",), "what forwards leave behind is right")),
    Rule(report, clears("loss", ("report",), "every reported loss is right")),
    _attributed(_recorded),
)
