"""The link that final gradients alone show: what they are made of."""

from collections.abc import Sequence
from dataclasses import replace

from validation.diagnosis.evidence import Evidence
from validation.diagnosis.rules.passages import unexplained_passage
from validation.diagnosis.rules.supposed import supposed
from validation.diagnosis.rules.update import near
from validation.judging.cause import Cause


def attributed(evidence: Evidence) -> list[Cause]:
    """The causes that attribution names; where it finds none for gradients that are wrong, what can be supposed."""
    found = evidence.attribution
    if found is None or found.right or (evidence.sums is not None and evidence.sums.alike):
        return []
    causes = list(found.causes) or (supposed(evidence) if evidence.playable is not None else [])
    return causes if evidence.sums is None else [_clipped(evidence, cause) for cause in causes]


def unexplained(evidence: Evidence) -> Sequence[str]:
    """What is left without an explanation, at the boundaries and in gradients."""
    found = evidence.unexplained
    if found and evidence.passed:
        return (*unexplained_passage(evidence), *found)
    wrong = [law for law in ("none-ness", "gradient") if evidence.sums is not None and evidence.differs(law)]
    return found or tuple(f"{law}: what is wrong with it tells nothing" for law in wrong[:1])


def _clipped(evidence: Evidence, cause: Cause) -> Cause:
    """``cause`` with a word on clipping, where all gradients are a part of what they should be: it does just that."""
    factor, size, most = cause.factor, evidence.expected.norm, evidence.max_norm
    if cause.kind != "scale" or cause.stage is not None or cause.rank is not None:
        return cause
    if factor is None or not 0 < factor < 1 or not size:
        return cause
    text = ""
    if most is not None and near(factor, most / (size + 1e-6)):
        text = f"clipping to {most:g} does that: they were compared after it"
    elif evidence.verdict.law("grad-norm").outcome == "pass":
        text = f"the norm is right, so it was done later, as clipping to {factor * size:.6g} does: compare before that"
    return replace(cause, detail="; ".join(filter(None, (cause.detail, text))))
