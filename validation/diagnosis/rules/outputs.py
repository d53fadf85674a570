"""Outputs that a step hands back by name, and that are others than what it computed: gradients are right."""

from collections.abc import Sequence

from torch import Tensor

from pipeproof.diagnosis.evidence import Evidence
from pipeproof.judging.cause import Cause, listed
from pipeproof.judging.tolerance import agrees
from pipeproof.judging.verdict import Mismatch, Size

_UNTOLD = (
    "outputs are wrong and gradients right: they are handed back otherwise than computed, or a part has no gradient"
)
_UPSTREAM = ("gradient", "presence", "loss", "buffers", "boundaries")
_ALIKE = 1e-3  # between factors that are one; a cosine that is as near to 1 is that of a multiple


def outputs(evidence: Evidence) -> list[Cause]:
    """Outputs that are those of other microbatches, or a multiple of what they should be."""
    found = _wrong(evidence)
    alike = [one for one in found if found and (one.rank, one.output) == (found[0].rank, found[0].output)]
    told = _others(alike, evidence) or _multiple(alike)
    if not told or len(alike) < len(found):
        return []
    detail, factor = told
    microbatches = tuple(one.microbatch for one in alike if one.microbatch is not None)
    detail = f"output {alike[0].output}: {detail}; gradients are right"
    return [Cause("report", rank=alike[0].rank, microbatches=microbatches, factor=factor, detail=detail)]


def untold(evidence: Evidence) -> Sequence[str]:
    """That nothing tells why outputs are wrong; empty where none is."""
    return (_UNTOLD,) if _wrong(evidence) else ()


def _wrong(evidence: Evidence) -> list[Mismatch]:
    """The outputs that are wrong where nothing is that they are made of."""
    found = [one for one in evidence.verdict.mismatches if one.law == "outputs"]
    return [] if any(map(evidence.differs, _UPSTREAM)) else found


def _others(found: Sequence[Mismatch], evidence: Evidence) -> tuple[str, None] | None:
    """The microbatches whose outputs they are."""
    really = [_of(one, evidence) for one in found]
    known = [one for one in really if one is not None]
    if not known or len(known) < len(really):
        return None
    return f"microbatch{'es' if len(known) > 1 else ''} {listed(known)}'s", None


def _of(one: Mismatch, evidence: Evidence) -> int | None:
    """The only other microbatch whose output it is."""
    seen = _seen(one, evidence)
    if seen is None or one.output is None:
        return None
    due = [made.outputs[one.output].cpu() for made in evidence.expected.contributions]
    same = [m for m, other in enumerate(due) if m != one.microbatch and agrees(seen, other, one.limit or 0.0)]
    return same[0] if len(same) == 1 else None


def _seen(one: Mismatch, evidence: Evidence) -> Tensor | None:
    if one.rank is None or one.output is None or one.microbatch is None:
        return None
    own = evidence.observed.ranks[one.rank][evidence.number]
    share = range(evidence.microbatches) if own.share is None else own.share
    return own.outputs[one.output][list(share).index(one.microbatch)]


def _multiple(found: Sequence[Mismatch]) -> tuple[str, float] | None:
    """By what all of them are multiplied."""
    sizes = [one.found for one in found if isinstance(one.found, Size)]
    factors = [one.factor for one in sizes if one.factor is not None and 1 - abs(one.cosine or 0.0) < _ALIKE]
    if not factors or len(factors) < len(found) or max(factors) - min(factors) > _ALIKE * abs(factors[0]):
        return None
    return "a multiple of what it should be", factors[0]
