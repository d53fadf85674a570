"""Stages that are given data, or a message, of an operation before, or compute with its weights."""

from pipeproof.core.cause import Cause, listed
from pipeproof.core.old_weights import find_old_weights
from pipeproof.explain.evidence import Evidence


def stale(evidence: Evidence) -> list[Cause]:
    """The first stage that was given tensors of an operation before in place of its own."""
    if not evidence.stale:
        return []
    first = min(evidence.stale, key=lambda one: (one.stage, one.operation))
    found = [one for one in evidence.stale if (one.stage, one.operation) == (first.stage, first.operation)]
    given = listed(one.microbatch for one in found)
    detail = (
        f"at calls {listed(one.call for one in found)}: what microbatches {given} of operation {first.operation} had"
    )
    return [Cause("stale-tensor", rank=evidence.placement[first.stage], stage=first.stage, detail=detail)]


def old_weights(evidence: Evidence) -> list[Cause]:
    """The stages that computed with the weights of an operation before."""
    found = find_old_weights(evidence)
    if found is None:
        return []
    when = f"operation {found.operation}" if found.operation else "the last checked step that was bit for bit"
    detail = f"computed with the weights that {when} began with: with these the reference gives all that was seen"
    whole = len(found.stages) == evidence.stages > 1
    ranks = {evidence.placement[stage] for stage in found.stages}
    return [
        Cause(
            "stale-tensor",
            rank=ranks.pop() if len(ranks) == 1 and not whole else None,
            stage=found.stages[0] if len(found.stages) == 1 else None,
            stages=tuple(found.stages) if 1 < len(found.stages) and not whole else (),
            detail=detail,
        )
    ]
