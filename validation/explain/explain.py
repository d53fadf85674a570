"""From a mismatch to its fault.

Rules follow the way of a gradient: the order of actions, the tensors at the boundaries, each microbatch's addition to
the sums, the reduction of tied parameters, the norm, the clipping, the update, the report. The first broken link is the
cause; anything after it is consequence, and the sound links before it are ruled out. A rule applies to any source of
its evidence: our own ranks, a foreign step, a record. Without a recording, the composition of the final gradients
stands for the links that only a recording shows.
"""

from collections.abc import Callable
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
from pipeproof.explain.rule import Rule, clears, follow_rules
from pipeproof.explain.rules.attributed import attribute_gradients, in_part, list_unexplained
from pipeproof.explain.rules.besides import besides, besides_backwards
from pipeproof.explain.rules.boundaries import boundaries
from pipeproof.explain.rules.calls import calls
from pipeproof.explain.rules.passages import passages, sound
from pipeproof.explain.rules.places import place_cause
from pipeproof.explain.rules.report import (
    list_unreported,
    losses,
    norm,
    of_no_known_norm,
    outputs,
    report,
    wrong_outputs,
)
from pipeproof.explain.rules.shared import explain_shared, list_apart
from pipeproof.explain.rules.update import buffers, no_update, update
from pipeproof.explain.rules.weights import nameless, old_weights, other_weights, partition, stale, weights
from pipeproof.explain.sights import measure
from pipeproof.explain.uncovered import with_uncovered


def diagnose(setup: Setup, observed: Observed, verdict: Verdict) -> Verdict:
    """Add causes to the ``verdict`` on our own run, likeliest first."""
    if verdict.outcome == "pass" or not verdict.mismatches:
        return verdict
    return explain_verdict(of_run(setup, observed, verdict))


def explain_verdict(evidence: Evidence) -> Verdict:
    """Add causes to the verdict, likeliest first, if the evidence decides."""
    if any(gradient is not None and gradient.is_complex() for gradient in evidence.gradients.values()):
        return replace(evidence.verdict, undecided=(UNSOUGHT,))
    with one_thread():
        found = follow_rules(evidence, RULES)
        or_message = any(cause.kind == "wrong-message" for one in found.alternatives for cause in one)
        located = [place_cause(cause, evidence) for cause in found.causes]
        found = replace(
            found,
            causes=tuple(with_lines(cause, evidence, or_message=or_message) for cause in located),
            alternatives=tuple(tuple(place_cause(cause, evidence) for cause in one) for one in found.alternatives),
        )
        found = replace(with_uncovered(found, evidence), measured=measure(evidence, found))
        if not evidence.left_out or not evidence.attribution:
            return found
    untold = f"{evidence.left_out} more wrong gradients were not examined: they are too large to keep"
    return replace(found, undecided=(*found.undecided, untold))


def explain_safely(verdict: Verdict, look: Callable[[], Verdict]) -> Verdict:
    """Return ``look()``, the explained ``verdict``; if it raises, the same verdict with a note of the crash.

    What fails never depends on an explanation, in which code of the user's own may run. For an unknown verdict, causes
    that leave something open are no explanation.
    """
    try:
        found = look()
    except Exception as error:  # no one type: a rule of ours may be wrong, and so may a model
        return verdict.drop_cause(Crash.of(error))
    if found.outcome == "unknown" and found.causes and found.undecided:
        return replace(found, causes=(), alternatives=(), cells=None)
    return found


def _agree(evidence: Evidence) -> RuledOut | None:
    """Ranks with a common stage agree; for shards this excludes nothing."""
    kinds = () if evidence.members is not None and evidence.members.in_shards else ("not-reduced",)
    return clears("replicas", kinds, "ranks that have a stage in common agree", unless="presence")(evidence)


def _began(evidence: Evidence) -> RuledOut | None:
    """Every parameter was observed at the start, and equals the model's."""
    if evidence.playable is None:
        if evidence.verdict.law("initial-weights").note:
            return None  # some were not observed before they were used
        return clears("initial-weights", (), "every stage began with the model's parameters")(evidence)
    if evidence.recording is None or not evidence.recording.parameters.keys() >= evidence.expected.gradients.keys():
        return None
    return RuledOut((), "every stage began with the model's parameters", len(evidence.recording.parameters))


def _rule_out_calls(evidence: Evidence) -> RuledOut | None:
    """Every stage was watched, with a known microbatch for every call, and ran in order, or in an unknown order."""
    number, every, unseen = evidence.number, list(range(evidence.microbatches)), evidence.unseen
    untold = any(flow.untold or flow.mixed or any(flow.extra) for flow in evidence.passed.values())
    if unseen or untold or evidence.verdict.law("microbatches").note:
        return None  # a note tells of calls that were not counted
    if evidence.playable is None:
        backwards = evidence.observed.backwards(number).items()
        orders = [
            *evidence.observed.forwards(number).values(),
            *(ran for s, ran in backwards if s not in evidence.frozen),
        ]
        modes = [training for _, training in evidence.observed.calls(number)]
        if not all(modes) or not all(sorted(order) == every for order in orders):
            return None
    whole = "every stage ran once each way for each microbatch, in the right mode"
    return clears("microbatches", ("order", "mode"), whole)(evidence)


def _rule_out_crossings(evidence: Evidence) -> RuledOut | None:
    """Every boundary tensor was recorded, and equals the reference's."""
    expected, recording = set(evidence.played[evidence.number].tensors), evidence.recording
    if recording is None:
        return None
    if not any(point.where == LATE for point in recording.tensors):  # no backward was split
        expected = {point for point in expected if point.where != LATE}
    if not recording.tensors.keys() >= expected:
        return None
    return RuledOut(("wrong-message", "swapped-data"), "every boundary tensor is right", len(expected))


# In the order of the flow.
RULES: tuple[Rule, ...] = (
    Rule(partition, clears("parameters-once", (), "every parameter is held once"), left=nameless),
    Rule(
        weights,
        _began,
        lambda e: e.run is not None and (e.playable is not None or bool(e.run.before(e.number))),
        left=other_weights,
    ),
    Rule(
        calls,
        _rule_out_calls,
        lambda e: e.run is not None and e.run.watched and len(e.unseen) < e.stages,
        besides=besides_backwards,
    ),
    Rule(boundaries, _rule_out_crossings, lambda e: e.recording is not None, besides=besides),
    Rule(stale),
    Rule(old_weights),
    Rule(passages, sound, lambda e: e.run is not None and bool(e.run.crossings(e.number)), besides=besides),
    Rule(explain_shared, _agree, lambda e: e.members is not None and e.members.shared, list_apart),
    Rule(no_update),
    Rule(
        attribute_gradients,
        clears(
            "gradient",
            ("scale", "sign", "dropped", "doubled"),
            "every gradient that was compared is what it should be",
            unless="presence",
        ),
        left=list_unexplained,
        beside=lambda e: e.attribution.ruled_out if e.attribution is not None and e.attribution.causes else (),
        besides=in_part,
    ),
    Rule(
        norm,
        clears("grad-norm", ("norm",), "the norm is that of the gradients"),
        lambda e: e.playable is not None or e.verdict.law("grad-norm").checked > 0,
        of_no_known_norm,
    ),
    Rule(update, clears("updated-parameters", ("clip", "update"), "the optimizer did what it should")),
    Rule(buffers, clears("buffers", ("buffers",), "what forwards leave behind is right")),
    Rule(
        report,
        clears("loss", ("report",), "every reported loss is right"),
        left=lambda e: list_unreported("losses", losses(e)),
    ),
    Rule(
        outputs,
        clears("outputs", (), "every named output is right"),
        left=lambda e: list_unreported("outputs", wrong_outputs(e)),
    ),
)
