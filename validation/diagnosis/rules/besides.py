"""What is wrong besides the causes that boundaries show, and where nobody can say."""

from collections.abc import Sequence

from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.rules.attributed import played_through
from pipeproof.diagnosis.rules.passages import ALIKE, agree, complete
from pipeproof.diagnosis.rules.replayed import besides_change
from pipeproof.judging.cause import Cause

Found = tuple[Sequence[Cause], Sequence[str]]
_BEHIND = "what follows from this was not judged: more may be wrong in gradients, or in a later stage"


def besides(evidence: Evidence, causes: Sequence[Cause]) -> Found:
    """Further causes, and what stays open. Final gradients say it, where they explain everything and name the same.

    Not of exchanges, of which they may show one as several, nor what is like one of ``causes``: it comes of that. What
    went wrong in a forward, all gradients follow from: where they do not explain that, it is played, and they are held
    against what comes of it.
    """
    forward = any("F" in (cause.action or "") for cause in causes)
    if evidence.playable is not None and (not forward or evidence.operation != "train"):
        return (), ()
    said = complete(evidence)
    same = [one for one in said if any(agree(cause, one) for cause in causes)]
    alike = [group for group in ALIKE for cause in causes if cause.kind in group]
    others = [one for one in said if one not in same and not any(one.kind in group for group in alike)]
    others = [one for one in others if one.stage is not None]
    if not forward:
        told = same and all("B" in (cause.action or "") and cause.kind not in ALIKE[0] for cause in causes)
        left = evidence.playable is None and evidence.attribution is not None and evidence.attribution.unknown
        return (others if told else ()), (_BEHIND,) if left else ()
    if same:
        return others, ()
    if evidence.playable is not None:  # one thing that gives all that was seen leaves nothing else
        whole = any(agree(one, other) for one in causes for other in played_through(evidence))
        return (), () if whole else (_BEHIND,)
    found = besides_change(evidence, causes[0]) if len(causes) == 1 else None
    if found is None or found.unknown:
        return (() if found is None else found.causes), (_BEHIND,)
    return found.causes, ()
