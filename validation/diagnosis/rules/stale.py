"""Stages that are given what an operation before had: data, or a message, that was kept."""

from pipeproof.diagnosis.evidence import Evidence
from pipeproof.judging.cause import Cause, listed


def stale(evidence: Evidence) -> list[Cause]:
    """The first stage that was given tensors of an operation before in place of its own."""
    if not evidence.stale:
        return []
    stage, operation = min((one.stage, one.operation) for one in evidence.stale)
    found = [one for one in evidence.stale if (one.stage, one.operation) == (stage, operation)]
    calls, theirs = [one.call for one in found], [one.microbatch for one in found]
    several = len(found) > 1
    detail = (
        f"call{'s' * several} {listed(calls)} {'were' if several else 'was'} given what microbatch"
        f"{'es' * several} {listed(theirs)} of operation {operation} had there"
    )
    return [Cause("stale-tensor", rank=evidence.placement[stage], stage=stage, detail=detail)]
