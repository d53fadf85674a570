"""From what disagrees to the fault that explains it.

Evidence is followed along the way that a gradient takes: the order of actions, the tensors at the boundaries, each
microbatch's addition to the sums, the reduction of tied parameters, the norm, the clipping, the update, the report. The
first link that broke is the cause; what comes after it is consequence, and the sound links before it are ruled out.
A rule is followed where there is the evidence that it needs, whoever made it: our own ranks, a foreign step, a record.
Where nothing was recorded, what the final gradients are made of stands for the links that only a recording shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from pipeproof.core.cause import RuledOut
from pipeproof.core.judge import one_thread
from pipeproof.core.observe.observed import Observed
from pipeproof.core.observe.recording import LATE
from pipeproof.core.observe.sketch import UNSOUGHT
from pipeproof.core.verdict import Crash, Verdict
from pipeproof.explain.evidence import Evidence, of_run
from pipeproof.explain.own_lines import with_lines
from pipeproof.explain.played import Setup
from pipeproof.explain.rule import Rule, clears, followed
from pipeproof.explain.rules.attributed import attributed, in_part, unexplained
from pipeproof.explain.rules.besides import besides, besides_backwards
from pipeproof.explain.rules.boundaries import boundaries
from pipeproof.explain.rules.calls import calls
from pipeproof.explain.rules.laws import buffers, nameless, no_update, partition
from pipeproof.explain.rules.norms import norm, of_no_known_norm
from pipeproof.explain.rules.passages import passages, sound
from pipeproof.explain.rules.places import placed
from pipeproof.explain.rules.report import outputs, report, unreported, untold
from pipeproof.explain.rules.shared import apart, shared
from pipeproof.explain.rules.update import update
from pipeproof.explain.rules.weights import old_weights, other_weights, stale, weights
from pipeproof.explain.sights import measured
from pipeproof.explain.uncovered import with_uncovered


def diagnose(setup: Setup, observed: Observed, verdict: Verdict) -> Verdict:
    """``verdict`` on a run of our own with its causes, the likeliest first."""
    if verdict.verdict == "pass" or not verdict.mismatches:
        return verdict
    return explained(of_run(setup, observed, verdict))


def explained(evidence: Evidence) -> Verdict:
    """The verdict with its causes, the likeliest first; none where the evidence does not decide."""
    if any(gradient is not None and gradient.is_complex() for gradient in evidence.gradients.values()):
        return replace(evidence.verdict, undecided=(UNSOUGHT,))
    with one_thread():
        found = followed(evidence, RULES)
        or_message = any(cause.kind == "wrong-message" for one in found.alternatives for cause in one)
        located = [placed(cause, evidence) for cause in found.cause]
        found = replace(
            found,
            cause=tuple(with_lines(cause, evidence, or_message=or_message) for cause in located),
            alternatives=tuple(tuple(placed(cause, evidence) for cause in one) for one in found.alternatives),
        )
        found = replace(with_uncovered(found, evidence), measured=measured(evidence, found))
        if not evidence.left_out or not evidence.attribution:
            return found
    untold = f"{evidence.left_out} more wrong gradients were not looked at, for they are too large to be kept"
    return replace(found, undecided=(*found.undecided, untold))


def sought(verdict: Verdict, look: Callable[[], Verdict]) -> Verdict:
    """``look()``, which is ``verdict`` with its causes; where looking raises, the same verdict with a note of that.

    What fails never depends on an explanation, in which code of the user's own may run. Of what is unknown, causes that
    leave something open are no explanation.
    """
    try:
        found = look()
    except Exception as error:  # no one type: a rule of ours may be wrong, and so may a model
        return verdict.without_cause(Crash.of(error))
    if found.verdict == "unknown" and found.cause and found.undecided:
        return replace(found, cause=(), alternatives=(), cells=None)
    return found


def _begun(evidence: Evidence) -> bool:
    """Whether anything is known of what the run began with."""
    return evidence.seen is not None and (evidence.playable is not None or bool(evidence.seen.before(evidence.number)))


def _watched(evidence: Evidence) -> bool:
    return evidence.seen is not None and evidence.seen.watched and len(evidence.unseen) < evidence.stages


def _passed(evidence: Evidence) -> bool:
    return evidence.seen is not None and bool(evidence.seen.crossings(evidence.number))


def _recorded(evidence: Evidence) -> bool:
    return evidence.recording is not None


def _held_together(evidence: Evidence) -> bool:
    """Whether several ranks have something in common."""
    return evidence.members is not None and evidence.members.shared


def _agree(evidence: Evidence) -> RuledOut | None:
    """Ranks with a stage in common have the same; of shards that says nothing of sums."""
    kinds = () if evidence.members is not None and evidence.members.in_shards else ("not-reduced",)
    told = clears("replicas", kinds, "ranks that have a stage in common agree")(evidence)
    return None if evidence.differs("presence") else told


def _entered(law: str) -> Callable[[Evidence], bool]:
    """Whether ``law`` was looked at."""
    return lambda evidence: evidence.playable is not None or evidence.verdict.law(law).checked > 0


def _began(evidence: Evidence) -> RuledOut | None:
    """Every parameter was seen as the operation began, and is the model's."""
    if evidence.playable is None:
        if evidence.verdict.law("initial-weights").note:
            return None  # some were not seen before they were used
        return clears("initial-weights", (), "every stage began with the model's parameters")(evidence)
    if evidence.recording is None or not evidence.recording.parameters.keys() >= evidence.expected.gradients.keys():
        return None
    return RuledOut((), "every stage began with the model's parameters", len(evidence.recording.parameters))


def _ran(evidence: Evidence) -> RuledOut | None:
    """Every stage was watched, and it is known of every call which microbatch it was about."""
    untold = any(flow.untold or flow.mixed or any(flow.extra) for flow in evidence.passed.values())
    orderly = evidence.playable is not None or _orderly(evidence)
    if evidence.unseen or untold or not orderly or evidence.verdict.law("microbatches").note:
        return None  # a note tells of calls that were not counted
    whole = "every stage ran once each way for each microbatch, in the right mode"
    return clears("microbatches", ("order", "mode"), whole)(evidence)


def _orderly(evidence: Evidence) -> bool:
    """Whether every watched stage ran as it should, or nobody knows better."""
    number, every, untold = evidence.number, list(range(evidence.microbatches)), evidence.unseen
    forwards, backwards = evidence.observed.forwards(number), evidence.observed.backwards(number)
    orders = [(forwards, untold), (backwards, {*untold, *evidence.frozen})]
    once = all(sorted(order) == every for ran, left in orders for stage, order in ran.items() if stage not in left)
    return once and all(training for _, training in evidence.observed.called(number))


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


def _beside(evidence: Evidence) -> Sequence[RuledOut]:
    found = evidence.attribution
    return found.ruled_out if found is not None and found.causes else ()


def _right(evidence: Evidence) -> RuledOut | None:
    """Every gradient is there, and what it should be."""
    kinds = ("scale", "sign", "dropped", "doubled")
    told = clears("gradient", kinds, "every gradient that was compared is what it should be")(evidence)
    return None if evidence.differs("presence") else told


# In the order of the flow.
RULES: tuple[Rule, ...] = (
    Rule(partition, clears("parameters-once", (), "every parameter is held once"), left=nameless),
    Rule(weights, _began, _begun, left=other_weights),
    Rule(calls, _ran, _watched, besides=besides_backwards),
    Rule(boundaries, _crossed, _recorded, besides=besides),
    Rule(stale),
    Rule(old_weights),
    Rule(passages, sound, _passed, besides=besides),
    Rule(shared, _agree, _held_together, apart),
    Rule(no_update),
    Rule(attributed, _right, left=unexplained, beside=_beside, besides=in_part),
    Rule(
        norm,
        clears("grad-norm", ("norm",), "the norm is that of the gradients"),
        _entered("grad-norm"),
        of_no_known_norm,
    ),
    Rule(update, clears("updated-parameters", ("clip", "update"), "the optimizer did what it should")),
    Rule(buffers, clears("buffers", ("buffers",), "what forwards leave behind is right")),
    Rule(report, clears("loss", ("report",), "every reported loss is right"), left=unreported),
    Rule(outputs, clears("outputs", (), "every named output is right"), left=untold),
)
