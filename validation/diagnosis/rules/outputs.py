"""Outputs that a step hands back by name, and that are others than what it computed: gradients are right."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeproof.core.cause import Cause, listed
from pipeproof.core.tolerance import agrees
from pipeproof.core.verdict import Mismatch
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.likeness import likeness
from pipeproof.diagnosis.limits import LEFT

_UNTOLD = (
    "outputs are wrong and gradients right: they are handed back otherwise than computed, or a part has no gradient"
)
_UPSTREAM = ("gradient", "presence", "loss", "buffers", "boundaries")


def outputs(evidence: Evidence) -> list[Cause]:
    """Outputs that are those of other microbatches, or their own in a way that is known."""
    found = _wrong(evidence)
    alike = [one for one in found if found and (one.rank, one.output) == (found[0].rank, found[0].output)]
    told = _others(alike, evidence) or _changed(alike, evidence)
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


def _changed(found: Sequence[Mismatch], evidence: Evidence) -> tuple[str, float | None] | None:
    """What all of them together are in place of what they should be; of several, no part is told."""
    pairs = [pair for one in found if (pair := _pair(one, evidence)) is not None]
    if not pairs or len(pairs) < len(found):
        return None
    sides = zip(*pairs, strict=True)
    seen, due = pairs[0] if len(pairs) == 1 else (torch.cat([one.flatten() for one in side]) for side in sides)
    made = likeness(seen, due, limit=max(one.limit or 0.0 for one in found))
    if made is None or (made.part is not None and len(pairs) > 1) or not (made.is_known or made.part is not None):
        return None
    if made.kind != "multiple" or made.part is not None or made.factor is None:
        return made.text, None
    return ("a multiple of what it should be", made.factor) if _is_plain(made.factor, seen, due) else None


def _is_plain(factor: float, seen: Tensor, due: Tensor) -> bool:
    """Whether ``factor`` is all there is to it; one number is a multiple of any other."""
    left, change = (seen - factor * due).double().norm(), abs(factor - 1) * due.double().norm()
    return bool((due != due.flatten()[:1]).any()) and bool(left <= LEFT * change)


def _pair(one: Mismatch, evidence: Evidence) -> tuple[Tensor, Tensor] | None:
    """An output as it was handed back and as it should be, in one type; None where they have not one form."""
    seen = _seen(one, evidence)
    if seen is None or one.output is None or one.microbatch is None:
        return None
    due = evidence.expected.contributions[one.microbatch].outputs[one.output].cpu()
    kind = due.dtype if due.is_floating_point() else torch.float64
    return (seen.cpu().to(kind), due.to(kind)) if seen.shape == due.shape and not seen.is_complex() else None
