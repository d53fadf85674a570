"""Faults inside a stage beyond any single substitution."""

import math
from collections.abc import Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Mismatch
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import CLOSE
from pipeproof.explain.replay import is_same_loss
from pipeproof.pipeline.sizes import some


def other_forward(evidence: Evidence) -> list[Cause]:
    """Blame the only stage's forward, or its data, by elimination.

    Every reported loss is wrong, the weights are all right, and no loss is another's or a multiple.
    """
    losses = [one for one in evidence.verdict.mismatches if one.law == "loss"]
    begun = [one for one in evidence.verdict.laws if one.name == "initial-weights" and one.outcome == "pass"]
    known = evidence.run is not None and any(one.checked and not one.left_out for one in begun)
    besides = any(map(evidence.differs, ("presence", "buffers", "microbatches")))
    if evidence.beside is None or evidence.stages > 1 or not known or besides or _tell(losses, evidence):
        return []
    if not evidence.beside.plain:
        return []  # numbers drawn otherwise, or another mode, give other losses too
    detail = "every loss is wrong, and none is another microbatch's; weights are right; no factor gives the gradients"
    rank = evidence.placement[0] if evidence.ranks == 1 else None
    data = Cause("swapped-data", rank=rank, stage=0, detail="or its inputs or targets are not its own")
    return [replace(data, kind="computation", detail=detail, instead=(data,))]


def _tell(losses: Sequence[Mismatch], evidence: Evidence) -> bool:
    """True if losses match, belong to others, or share a multiple: they name the fault, or say too little."""
    right, observed = evidence.expected.losses, [one.observed for one in losses]
    rows = enumerate(row[evidence.number] for row in evidence.observed.ranks)
    reported = {(rank, m) for rank, row in rows for m, _ in zip(row.share or (), row.losses, strict=False)}
    if not reported or {(one.rank, one.microbatch) for one in losses} != reported:
        return True
    numbers = [one for one in observed if isinstance(one, float) and math.isfinite(one)]
    others = any(is_same_loss(one, other) for one in numbers for other in right)
    ratios = [one.ratio for one in losses if one.ratio is not None]
    multiple = all(abs(one / ratios[0] - 1) < CLOSE for one in ratios) if ratios and ratios[0] else True
    return len(numbers) < len(observed) or others or (multiple and evidence.microbatches > 1)


def first_of_backward(evidence: Evidence) -> Sequence[str]:
    """The first wrong gradient along the backward, given right losses and right gradients behind it; else empty."""
    used, wrong = evidence.used, evidence.wrong("gradient", "replicas", "presence")
    last = max((used.get(name, 0) for _, name in wrong), default=0)
    if not last or evidence.differs("loss"):
        return ()  # used outside its module, or nowhere
    stage, name = min(site for site in wrong if used.get(site[1], 0) == last)
    later = sum(used.get(name, 0) > last for _, name in evidence.gradients)  # not other names of one
    who = f"{some(later, 'parameter')} that the forward uses later {'is' if later == 1 else 'are'}"
    return (f"the backward first goes wrong at {name} (stage {stage}): the {who} right",) if later else ()
