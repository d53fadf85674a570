"""Stages that are given data, or a message, of an operation before, or compute with its weights."""

from dataclasses import replace

from pipeproof.core.cause import Cause, listed
from pipeproof.core.old_weights import OldWeights, find_old_weights
from pipeproof.diagnosis.evidence import Evidence


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


def old_weights(evidence: Evidence) -> list[Cause]:
    """The stages that computed with the weights of an operation before."""
    found = find_old_weights(evidence)
    return [] if found is None else [_cause(found, evidence)]


def _cause(found: OldWeights, evidence: Evidence) -> Cause:
    when = f"operation {found.operation}" if found.operation else "the last checked step that was bit for bit"
    detail = f"computed with the weights that {when} began with: with these the reference gives all that was seen"
    ranks = {evidence.placement[stage] for stage in found.stages}
    several = found.stages if 1 < len(found.stages) < evidence.stages else ()
    cause = Cause("stale-tensor", detail=detail, stages=several, stage=None if several else found.stages[0])
    if len(found.stages) == evidence.stages > 1:
        return replace(cause, stage=None)
    return replace(cause, rank=ranks.pop()) if len(ranks) == 1 else cause
