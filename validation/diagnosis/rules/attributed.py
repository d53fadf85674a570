"""The link that final gradients alone show: what they are made of."""

from validation.diagnosis.evidence import Evidence
from validation.diagnosis.rules.supposed import supposed
from validation.judging.cause import Cause


def attributed(evidence: Evidence) -> list[Cause]:
    """The causes that attribution names; where it finds none for gradients that are wrong, what can be supposed."""
    found = evidence.attribution
    if found is None or found.right:
        return []
    return list(found.causes) or supposed(evidence)
