"""From what disagrees to the fault that explains it.

Evidence is followed along the way that a gradient takes: the order of actions, the tensors at the boundaries, each
microbatch's addition to the sums, the reduction of tied parameters, the norm, the clipping, the update, the report. The
first link that broke is the cause; what comes after it is consequence, and the sound links before it are ruled out.
Where nothing was recorded, what the final gradients are made of stands for the links that only a recording shows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from validation.diagnosis.evidence import Evidence
from validation.diagnosis.rules.attributed import attributed
from validation.diagnosis.rules.boundaries import boundaries
from validation.diagnosis.rules.laws import buffers, calls, partition, weights
from validation.diagnosis.rules.norm import norm
from validation.diagnosis.rules.reduction import reduction
from validation.diagnosis.rules.report import report
from validation.diagnosis.rules.sums import sums
from validation.diagnosis.rules.update import clip, update
from validation.diagnosis.setup import Setup
from validation.judging.cause import Cause
from validation.judging.judge import one_thread
from validation.judging.verdict import Crash, Verdict
from validation.observers.observed import Observed

Shown = TypeVar("Shown")
Rule = Callable[[Evidence], list[Cause]]

# Links in the order of the flow; and what it means that one is sound. First those that a watched run shows ...
_RAN: Mapping[Rule, str] = {
    calls: "order, mode: every stage ran once each way for each microbatch, in the right mode",
}
# ... those on which a gradient is made, of which only a recording shows more than what came out ...
_MADE: Mapping[Rule, str] = {
    boundaries: "messages, buffers, computation: every recorded boundary tensor is right",
    sums: "microbatches: each action added what its microbatch contributes, and nothing touched the sums between",
    reduction: "tied parameters: every copy has the sum of all shares, and no other gradient changed meanwhile",
}
# ... and those on which it is used.
_USED: Mapping[Rule, str] = {
    norm: "norm: it is that of the gradients",
    clip: "clip: all gradients were multiplied alike",
    update: "update: the optimizer did what it should",
    buffers: "buffers: what forwards leave behind is right",
    report: "report: what was reported is what was computed",
}


def diagnose(setup: Setup, observed: Observed, verdict: Verdict) -> Verdict:
    """``verdict`` with its causes, the likeliest first; none where the evidence does not decide."""
    if verdict.verdict == "pass" or not verdict.mismatches:
        return verdict
    evidence = Evidence(setup, observed, verdict)
    with one_thread():
        return followed(verdict, evidence, _links(evidence), unexplained=lambda link: _left(link, evidence))


def sought(verdict: Verdict, look: Callable[[], Verdict]) -> Verdict:
    """``look()``, which is ``verdict`` with its causes; where looking raises, the same verdict with a note of that.

    A verdict never depends on its explanation, in which code of the user's own may run.
    """
    try:
        return look()
    except Exception as error:  # no one type: a rule of ours may be wrong, and so may a model
        return verdict.without_cause(Crash.of(error))


def followed(
    verdict: Verdict,
    evidence: Shown,
    links: Mapping[Callable[[Shown], list[Cause]], str],
    *,
    unexplained: Callable[[Callable[[Shown], list[Cause]]], Sequence[str]],
) -> Verdict:
    """``verdict`` with the causes of the first of ``links`` that broke; the ones before it are ruled out.

    ``unexplained``: what is wrong at a link that names no cause, where nothing behind it can be judged; empty where it
    is sound.
    """
    ruled_out: list[str] = []
    for link, sound in links.items():
        causes = link(evidence)
        if causes:
            return replace(verdict, cause=_ranked(causes, ruled_out))
        left = unexplained(link)
        if left:
            return replace(verdict, undecided=(*left, *ruled_out))
        ruled_out.append(sound)
    return replace(verdict, undecided=tuple(ruled_out))


def _left(link: Rule, evidence: Evidence) -> Sequence[str]:
    return evidence.unexplained if link is attributed else ()


def _links(evidence: Evidence) -> Mapping[Rule, str]:
    """The links that this evidence can judge. Attribution stands for those that only a recording shows."""
    held: Mapping[Rule, str] = {partition: "partition: every parameter is in the stage that should hold it"}
    begun: Mapping[Rule, str] = {weights: "weights: every stage began with the model's parameters"}
    made: Mapping[Rule, str] = {attributed: "gradients: they are made of what they should be"}
    ran: Mapping[Rule, str] = _RAN if evidence.observed.watched else {}
    if evidence.recording is not None:
        return {**held, **ran, **begun, **_MADE, **_USED, **made}
    return {**held, **ran, **begun, **made, **_USED}


def _ranked(causes: Sequence[Cause], ruled_out: Sequence[str]) -> tuple[Cause, ...]:
    """The first cause takes what was ruled out on the way to it."""
    return tuple(replace(cause, ruled_out=(*cause.ruled_out, *ruled_out)) for cause in causes[:1]) + tuple(causes[1:])
