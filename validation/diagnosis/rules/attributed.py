"""The link that final gradients alone show: what they are made of."""

from dataclasses import replace

from validation.diagnosis.attribution import Attribution
from validation.diagnosis.evidence import Evidence
from validation.diagnosis.rules.supposed import supposed
from validation.judging.cause import Cause


def attributed(evidence: Evidence) -> list[Cause]:
    """The causes that attribution names, the likeliest with what the coefficients speak against.

    Where it finds none for gradients that are wrong, whatever else the reference can suppose.
    """
    found = evidence.attribution
    if found is None or found.right:
        return []
    if not found.causes:
        return supposed(evidence)
    return named(found)


def named(found: Attribution | None) -> list[Cause]:
    """The causes that attribution names, the likeliest with what the coefficients speak against."""
    if found is None or not found.causes:
        return []
    first, *rest = found.causes
    return [replace(first, ruled_out=found.ruled_out), *rest]
