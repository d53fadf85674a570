"""From what disagrees to the fault that explains it.

Evidence is followed along the way that a gradient takes: the order of actions, the tensors at the boundaries, each
microbatch's addition to the sums, the reduction of tied parameters, the norm, the clipping, the update, the report. The
first link that broke is the cause; what comes after it is consequence, and the sound links before it are ruled out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from validation.case import Case
from validation.cause import Cause
from validation.evidence import Evidence
from validation.observed import Observed
from validation.rules.after import clip, norm, reduction, report, update
from validation.rules.boundaries import boundaries
from validation.rules.laws import buffers, calls, partition, weights
from validation.rules.sums import sums
from validation.verdict import Verdict

Rule = Callable[[Evidence], list[Cause]]
Attribute = Callable[[Case, Observed, int], Sequence[Cause]]

# In the order of the flow; and what it means that a link is sound.
LINKS: Mapping[Rule, str] = {
    partition: "partition: every parameter is in the stage that should hold it",
    calls: "order, mode: every stage ran once each way for each microbatch, in the right mode",
    weights: "weights: every stage began with the model's parameters",
    boundaries: "messages, buffers, computation: every recorded boundary tensor is right",
    sums: "microbatches: each action added what its microbatch contributes, and nothing touched the sums between",
    reduction: "tied parameters: every copy has the sum of all shares, and no other gradient changed meanwhile",
    norm: "norm: it is that of the gradients",
    clip: "clip: all gradients were multiplied alike",
    update: "update: the optimizer did what it should",
    buffers: "buffers: what forwards leave behind is right",
    report: "report: what was reported is what was computed",
}
RECORDED = (weights, boundaries, sums, reduction, clip)  # links that only a recording shows


def diagnose(case: Case, observed: Observed, verdict: Verdict, *, attribute: Attribute | None = None) -> Verdict:
    """``verdict`` with its causes, the likeliest first; none where the evidence does not decide.

    ``attribute`` finds causes from final gradients alone: it is asked where nothing was recorded, or all that was is
    right.
    """
    if verdict.verdict == "pass" or not verdict.mismatches:
        return verdict
    evidence = Evidence(case, observed, verdict)
    ruled_out: list[str] = []
    for link, sound in LINKS.items():
        if link in RECORDED and evidence.recording is None:
            continue
        causes = link(evidence)
        if causes:
            return replace(verdict, cause=_ranked(causes, ruled_out))
        ruled_out.append(sound)
    causes = list(attribute(case, observed, evidence.number)) if attribute is not None else []
    return replace(verdict, cause=_ranked(causes, ruled_out), undecided=() if causes else tuple(ruled_out))


def _ranked(causes: Sequence[Cause], ruled_out: Sequence[str]) -> tuple[Cause, ...]:
    """The first cause takes what was ruled out on the way to it."""
    return tuple(replace(cause, ruled_out=(*cause.ruled_out, *ruled_out)) for cause in causes[:1]) + tuple(causes[1:])
