"""Tokens that went to other experts than their scores say: all that was computed with these is right."""

from collections.abc import Sequence

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Mismatch
from pipeproof.pipeline.sizes import first_few


def misrouted(found: Sequence[Mismatch]) -> Cause:
    """The routers that chose otherwise, where with the experts that were ``found`` to be chosen nothing is wrong."""
    first = min(found, key=lambda one: one.stage or 0)
    alike = [one for one in found if (one.rank, one.router) == (first.rank, first.router)]
    microbatches = tuple(sorted({one.microbatch for one in alike if one.microbatch is not None}))
    routers = first_few([*dict.fromkeys(one.router for one in found if one.router is not None)])
    detail = f"router {routers}: what was computed with these experts is right"
    return Cause("misrouted", rank=first.rank, stage=first.stage, microbatches=microbatches, detail=detail)
