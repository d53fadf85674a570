"""Tokens that went to other experts than their scores say: all that was computed with these is right."""

from pipeproof.diagnosis.evidence import Evidence
from pipeproof.judging.cause import Cause, few

_LAW = "routing"


def misrouted(evidence: Evidence) -> list[Cause]:
    """The routers that chose otherwise, where nothing else is wrong."""
    found = [one for one in evidence.verdict.mismatches if one.law == _LAW]
    if not found or len(found) < len(evidence.verdict.mismatches):
        return []
    first = min(found, key=lambda one: one.stage or 0)
    alike = [one for one in found if (one.rank, one.router) == (first.rank, first.router)]
    microbatches = tuple(sorted({one.microbatch for one in alike if one.microbatch is not None}))
    routers = few([*dict.fromkeys(one.router for one in found if one.router is not None)])
    detail = f"router {routers}: what was computed with these experts is right"
    return [Cause("misrouted", rank=first.rank, stage=first.stage, microbatches=microbatches, detail=detail)]
