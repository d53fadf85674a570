"""The link that final gradients alone show: what they are made of."""

from dataclasses import replace

from validation.cause import Cause
from validation.evidence import Evidence


def attributed(evidence: Evidence) -> list[Cause]:
    """The causes that attribution names, the likeliest with what the coefficients speak against."""
    found = evidence.attribution
    if found is None or not found.causes:
        return []
    first, *rest = found.causes
    return [replace(first, ruled_out=found.ruled_out), *rest]
