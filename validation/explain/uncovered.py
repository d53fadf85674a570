"""Faults beyond the causes: a second fault never disappears silently.

A cause reaches anything behind it in the step: from a forward everything, from a backward the gradients of its stage
and of those before it, from a sum that sum alone. Mismatches that a cause may reach are left out.
"""

from dataclasses import replace

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Mismatch, Verdict
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.rules.places import stages_of
from pipeproof.pipeline.sizes import first_few

_COUNTED = frozenset({"dropped", "doubled"})
_BEHIND_LOSSES = _COUNTED | {"not-reduced", "stale-gradient", "tied-not-summed", "tied-doubled"}
_BEHIND_CALLS = _BEHIND_LOSSES - _COUNTED | {"scale", "sign", "unequal-weights"}
_BACKWARDS = _BEHIND_LOSSES | {"scale", "sign", "extra-term", "swapped-activations", "swapped-gradients"}
_IN_SUMS = frozenset({"not-reduced", "stale-gradient", "misplaced"})  # from which nothing flows
_BEHIND_SUMS = frozenset({"norm", "clip", "update", "report", "buffers", "step-skipped"})
_OF_SUMS = ("gradient", "presence", "replicas", "tied-copies")


def with_uncovered(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Add a line to ``verdict`` on mismatches beyond its explanations; without any, on all.

    Not if gradients stay with their ranks: these find further causes.
    """
    if not evidence.gradients and evidence.playable is None:
        return verdict
    first = min((one.operation for one in verdict.mismatches), default=1)
    wrong = [one for one in verdict.mismatches if one.operation == first and not one.within]
    if not verdict.causes:
        words = "" if verdict.undecided else "nothing explains this"
    else:
        words, found = "not explained by this", evidence.attribution if verdict.undecided else None
        if found is not None and {*found.unknown} & {*verdict.undecided}:  # that says more of gradients
            wrong = [one for one in wrong if one.law not in ("gradient", "presence")]
        causes = [cause for explanation in (verdict.causes, *verdict.alternatives) for cause in explanation]
        ran = {cause.kind for cause in causes} >= _COUNTED or any(one.what == "forward" for one in wrong)
        wrong = [one for one in wrong if not any(_reaches(cause, one, evidence, ran=ran) for cause in causes)]
    laws = dict.fromkeys(one.law for one in wrong)
    parts = []
    for law in laws:
        found_there = [one for one in wrong if one.law == law]
        names = sorted({one.parameter for one in found_there if one.parameter is not None})
        microbatches = sorted({one.microbatch for one in found_there if one.microbatch is not None})
        stages = sorted({one.stage for one in found_there if one.stage is not None})
        text = law + (f" of {first_few(names)}" if names else "")
        text += f" of microbatch{'es' * (len(microbatches) > 1)} {first_few(microbatches)}" if microbatches else ""
        parts.append(text + (f" in stage{'s' * (len(stages) > 1)} {first_few(stages)}" if stages else ""))
    left = "; ".join(parts)
    return replace(verdict, undecided=(*verdict.undecided, f"{words}: {left}")) if words and left else verdict


def _reaches(cause: Cause, one: Mismatch, evidence: Evidence, *, ran: bool) -> bool:
    """True if ``one`` may follow from ``cause``; ``ran``: forwards may have run differently, too."""
    kind = cause.kind
    if kind == "update" and evidence.operation != "train":  # weights moved meanwhile
        return True
    if one.law in ("loss", "outputs") or (one.law == "boundaries" and "F" in (one.action or "")):
        counted = kind in _COUNTED and (ran or one.microbatch is None)
        behind = cause.in_backward or kind in _BEHIND_LOSSES | _BEHIND_SUMS
        return counted or kind in ("report", "buffers") or not behind
    if one.law == "microbatches":
        return kind not in _BEHIND_CALLS | _BEHIND_SUMS
    if one.law not in _OF_SUMS:
        return True
    if kind in _BEHIND_SUMS:
        return False
    if cause.parameters and kind in _IN_SUMS:
        return one.parameter in cause.parameters
    if not cause.in_backward and (cause.in_forward or kind not in _BACKWARDS):
        return True
    shared = evidence.shared if evidence.right is None else evidence.right.update.shared
    tied = one.law == "tied-copies" or one.parameter in {name for _, name in shared}
    alone = kind in ("tied-not-summed", "tied-doubled")
    return tied or (not alone and (one.stage is None or one.stage <= max(stages_of(cause, evidence))))
