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
from pipeproof.core.verdict import Crash, Verdict
from pipeproof.diagnosis.evidence import Evidence, of_run
from pipeproof.diagnosis.own_lines import with_lines
from pipeproof.diagnosis.played import Setup
from pipeproof.diagnosis.rule import Rule, clears, followed
from pipeproof.diagnosis.rules.attributed import attributed, in_part, unexplained
from pipeproof.diagnosis.rules.besides import besides, besides_backwards
from pipeproof.diagnosis.rules.boundaries import boundaries
from pipeproof.diagnosis.rules.laws import buffers, calls, nameless, no_update, other_weights, partition, weights
from pipeproof.diagnosis.rules.loss_scale import by_scale
from pipeproof.diagnosis.rules.norms import norm, of_no_known_norm
from pipeproof.diagnosis.rules.outputs import outputs, untold
from pipeproof.diagnosis.rules.passages import otherwise, passages, sound
from pipeproof.diagnosis.rules.report import order_told, report, unreported
from pipeproof.diagnosis.rules.shared import apart, of_replicas, on_rank, shared
from pipeproof.diagnosis.rules.stale import old_weights, stale
from pipeproof.diagnosis.rules.sums import reduction, sums
from pipeproof.diagnosis.rules.together import together
from pipeproof.diagnosis.rules.update import clip, update
from pipeproof.diagnosis.sights import measured
from pipeproof.diagnosis.uncovered import with_uncovered
from pipeproof.observers.observed import Observed
from pipeproof.observers.recording import LATE
from pipeproof.observers.sketch import UNSOUGHT


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
        located = [on_rank(cause, evidence) for cause in of_replicas(found.cause, evidence)]
        found = replace(
            found,
            cause=tuple(with_lines(cause, evidence, or_message=or_message) for cause in located),
            alternatives=tuple(tuple(on_rank(cause, evidence) for cause in one) for one in found.alternatives),
        )
        found = replace(with_uncovered(found, evidence), measured=measured(evidence, found))
        left_out = 0 if evidence.sums is None else evidence.sums.left_out
        if not left_out or not evidence.attribution:
            return found
    untold = f"{left_out} more wrong gradients were not looked at, for they are too large to be kept"
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


def _unrecorded(evidence: Evidence) -> bool:
    return evidence.recording is None


def _held_together(evidence: Evidence) -> bool:
    """Whether several ranks have something in common."""
    if evidence.members is not None:
        return any(len(stage.part.members) > 1 for stage in evidence.members.stages)
    return evidence.sums is not None and bool(evidence.sums.copies)


def _agree(evidence: Evidence) -> RuledOut | None:
    """Ranks with a stage in common have the same; of shards that no other replica has, that says nothing of sums."""
    cut = evidence.members is not None and evidence.members.cut_over_replicas
    kinds = () if cut else ("not-reduced",)
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


def _added(evidence: Evidence) -> RuledOut | None:
    """Every action's addition was recorded, and is what its microbatch contributes."""
    recording, number = evidence.recording, evidence.stages * evidence.microbatches
    added = 0 if recording is None else sum(map(len, recording.additions.values()))
    if added < number or evidence.broken_sums or evidence.operation == "eval":
        return None
    return RuledOut(("dropped", "doubled"), "each action added what its microbatch contributes", added)


def _beside(evidence: Evidence) -> Sequence[RuledOut]:
    found = evidence.attribution
    return found.ruled_out if found is not None and found.causes else ()


def _right(evidence: Evidence) -> RuledOut | None:
    """Every gradient is there, and what it should be."""
    kinds = ("scale", "sign", "dropped", "doubled")
    told = clears("gradient", kinds, "every gradient that was compared is what it should be")(evidence)
    return None if evidence.differs("presence") else told


def _attributed(needs: Callable[[Evidence], bool]) -> Rule[Evidence]:
    return Rule(by_scale(attributed), _right, needs, left=unexplained, beside=_beside, besides=in_part)


# In the order of the flow. Attribution stands for the links that only a recording shows.
RULES: tuple[Rule[Evidence], ...] = (
    Rule(partition, clears("parameters-once", (), "every parameter is held once"), left=nameless),
    Rule(weights, _began, _begun, left=other_weights),
    Rule(together, needs=_passed),
    Rule(order_told, needs=lambda evidence: bool(evidence.told)),
    Rule(calls, _ran, _watched, otherwise=otherwise, besides=besides_backwards),
    Rule(boundaries, _crossed, _recorded, besides=besides),
    Rule(stale),
    Rule(old_weights),
    Rule(by_scale(passages), sound, _passed, otherwise=otherwise, besides=besides),
    Rule(sums, _added, _recorded),
    Rule(
        reduction,
        clears("tied-copies", ("tied-not-summed", "tied-doubled"), "every copy has the sum of all shares"),
        _recorded,
    ),
    Rule(shared, _agree, _held_together, apart),
    Rule(no_update),
    _attributed(_unrecorded),
    Rule(
        by_scale(norm),
        clears("grad-norm", ("norm",), "the norm is that of the gradients"),
        _entered("grad-norm"),
        of_no_known_norm,
    ),
    Rule(clip, clears("updated-parameters", ("clip",), "all gradients were multiplied alike")),
    Rule(update, clears("updated-parameters", ("update",), "the optimizer did what it should")),
    Rule(buffers, clears("buffers", ("buffers",), "what forwards leave behind is right")),
    Rule(report, clears("loss", ("report",), "every reported loss is right"), left=unreported),
    Rule(outputs, clears("outputs", (), "every named output is right"), left=untold),
    _attributed(_recorded),
)
