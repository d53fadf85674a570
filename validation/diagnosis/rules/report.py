"""The report: losses that ranks say otherwise than the stages computed them.

That gradients are right does not prove that the losses were, unless the code is known that made them: what no gradient
comes from may be wrong in them.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from pipeproof.core.cause import Cause
from pipeproof.core.limits import FP32
from pipeproof.core.tolerance import scalar_error
from pipeproof.core.verdict import Mismatch
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.limits import DECIDED
from pipeproof.observers.likeness import NARROWER
from pipeproof.reference.step import Gradient

_UNTOLD = "losses are wrong and gradients right: they are reported otherwise than computed, or a part has no gradient"


def report(evidence: Evidence) -> list[Cause]:
    """Losses that are reported otherwise than computed.

    Of code that is not ours, those that are others of the right ones, or all of them a multiple.
    """
    causes = _reported(evidence)
    if evidence.playable is not None:
        return causes
    found = _numbers(evidence)
    told = _told(found, evidence) if causes else ""
    return [replace(cause, detail=f"{_first(found)}: {told}; gradients are right") for cause in causes if told]


def order_told(evidence: Evidence) -> list[Cause]:
    """An order that the step handed back, in which microbatches are missing whose gradients are there.

    Where it has one twice, that alone does not show in gradients: it is no matter of this.
    """
    found = [m for m in evidence.verdict.mismatches if m.law == "microbatches"]
    laws = ("gradient", "presence", "tied-copies", "replicas", "boundaries", "buffers")
    compared = evidence.verdict.law("gradient")
    if not found or any(map(evidence.differs, laws)) or compared.outcome != "pass" or not compared.checked:
        return []
    told = all(m.stage in evidence.told and m.what in ("forward", "backward") for m in found)
    stages = sorted({m.stage for m in found if m.stage is not None})
    if not told or not all(_there(evidence, stage, _missing(evidence, stage)) for stage in stages):
        return []
    detail = f"the order that was handed back has {found[0].seen}, and all microbatches are in the gradients"
    one = stages[0] if len(stages) == 1 else None
    return [Cause("report", stage=one, stages=tuple(stages) if one is None else (), detail=detail)]


def _missing(evidence: Evidence, stage: int) -> set[int]:
    """The microbatches that have no forward, or no backward, in the order of ``stage``."""
    orders = (evidence.observed.forwards(evidence.number), evidence.observed.backwards(evidence.number))
    return {m for ran in orders for m in range(evidence.microbatches) if m not in ran[stage]}


def _there(evidence: Evidence, stage: int, microbatches: Collection[int]) -> bool:
    """Whether there are such microbatches, and a right gradient of ``stage`` shows that each of them ran."""
    if evidence.members is None:
        return False
    whole = {site: one for site, one in evidence.gradients.items() if site[0] == stage and one is not None}
    parts = [evidence.members.contributions[m].gradients for m in microbatches]
    return bool(parts) and all(
        any(site in part and _size(part[site]) > DECIDED * _size(one) for site, one in whole.items()) for part in parts
    )


def _size(gradient: Gradient) -> float:
    return 0.0 if gradient is None else float(gradient.double().norm())


def unreported(evidence: Evidence) -> Sequence[str]:
    """That nothing tells why losses are wrong; empty where none is, or where that is told."""
    return (_UNTOLD,) if evidence.playable is None and _reported(evidence) else ()


def _wrong(evidence: Evidence) -> list[Mismatch]:
    """The losses of microbatches that are wrong; where none is, the totals."""
    found = [m for m in evidence.verdict.mismatches if m.law == "loss"]
    return [m for m in found if m.microbatch is not None] or found


def _reported(evidence: Evidence) -> list[Cause]:
    """Losses that are reported otherwise than the stages computed them."""
    found = _wrong(evidence)
    upstream = ("gradient", "presence", "updated-parameters", "buffers")
    if not found or any(map(evidence.differs, upstream)) or not _computed_right(evidence):
        return []
    ranks = {m.rank for m in found}
    alone = len(ranks) == 1 < evidence.ranks
    microbatches = tuple(sorted({m.microbatch for m in found if m.microbatch is not None}))
    factor = _ratio(found)
    detail = f"loss {found[0].seen}, expected {found[0].expected}, although the last stage computed what it should"
    return [
        Cause("report", rank=found[0].rank if alone else None, microbatches=microbatches, factor=factor, detail=detail)
    ]


def _computed_right(evidence: Evidence) -> bool:
    """Whether the stages computed the right losses: recorded, or in training, where gradients go by them.

    What an evaluation computed leaves no gradient; but where each microbatch's loss is right, or a multiple as all
    others are, only the report is left to blame.
    """
    if evidence.recording is not None or evidence.operation != "eval":
        return True
    found = [m for m in evidence.verdict.mismatches if m.law == "loss" and m.microbatch is not None]
    return not found or (evidence.microbatches > 1 and _ratio(found) is not None)


def _ratio(found: Sequence[Mismatch]) -> float | None:
    ratios = {None if m.ratio is None else round(m.ratio, 4) for m in found}
    return ratios.pop() if len(ratios) == 1 else None


def _numbers(evidence: Evidence) -> list[Mismatch]:
    found = _wrong(evidence)
    return found if all(m.what == "number" and math.isfinite(_seen(m)) for m in found) else []


def _seen(mismatch: Mismatch) -> float:
    assert isinstance(mismatch.found, float), "a number was compared"
    return mismatch.found


def _told(found: Sequence[Mismatch], evidence: Evidence) -> str:
    """What the losses that were seen are, in terms of the right ones; empty if they are nothing that tells."""
    right = evidence.expected.losses
    seen = list(map(_seen, found))
    if not found:
        return ""
    if found[0].microbatch is not None and all(any(_same(one, other) for other in right) for one in seen):
        return "those of other microbatches"
    for name, dtype in NARROWER.items():
        if all(one == _through(one, dtype) for one in seen) and all(_rounded(m, dtype) for m in found):
            return f"the right {'ones' if len(found) > 1 else 'one'}, {name}-rounded"
    ratios = [m.ratio for m in found if m.ratio is not None]
    one = ratios[0] if ratios else 1.0
    alike = len(ratios) == len(found) and all(_same(ratio, one) for ratio in ratios)
    count = evidence.microbatches
    counts = (count, evidence.ranks, evidence.stages)
    numbers = (-1.0, *counts, *(1 / number for number in counts), *_divisors(evidence))
    plain = any(_same(one, number) for number in numbers)
    if alike and (plain or len(found) == count > 1):
        return f"{one:.6g} times the right {'ones' if len(found) > 1 else 'one'}"
    if _of_own_share(evidence):
        return "each replica reports the mean of its own microbatches; as one number the whole step's is due"
    if _mean_is_right(evidence):
        return "ranks that work on one replica report their own parts', and the mean of these is right"
    alone = evidence.members is not None and evidence.members.replicas.count == 1
    return "other ranks report the right ones" if alone and len({m.rank for m in found}) < _reporting(evidence) else ""


def _of_own_share(evidence: Evidence) -> bool:
    """Whether every rank reports, as one number, the mean of the losses of its own replica."""
    rows, right = [row[evidence.number] for row in evidence.observed.ranks], evidence.expected.losses
    told = [(row.loss, [right[m] for m in row.share]) for row in rows if row.loss is not None and row.share]
    return bool(told) and all(_same(loss, sum(own) / len(own)) for loss, own in told)


def _mean_is_right(evidence: Evidence) -> bool:
    """Whether the ranks of each replica report other numbers for every microbatch, whose mean is the right one."""
    if evidence.members is None or evidence.seen is None:
        return False
    reported: dict[tuple[int, int], list[float]] = {}
    for replica, row in zip(evidence.members.replicas.of, evidence.observed.ranks, strict=True):
        for m, one in zip(row[evidence.number].share or (), row[evidence.number].losses, strict=False):
            reported.setdefault((replica, m), []).append(one)
    right = evidence.expected.losses
    means = [len(ones) > 1 and _same(sum(ones) / len(ones), right[m]) for (_, m), ones in reported.items()]
    return bool(means) and all(means)


def _through(number: float, dtype: torch.dtype) -> float:
    """``number`` in a narrower type."""
    return torch.tensor(number, dtype=torch.float64).to(dtype).item()


def _rounded(mismatch: Mismatch, dtype: torch.dtype) -> bool:
    """Whether a number is the right one, as far as ``dtype`` can tell it."""
    return mismatch.ratio is not None and abs(mismatch.ratio - 1) <= torch.finfo(dtype).eps


def _reporting(evidence: Evidence) -> int:
    """How many ranks report losses."""
    rows = [row[evidence.number] for row in evidence.observed.ranks]
    return sum(row.loss is not None or bool(row.losses) for row in rows)


def _divisors(evidence: Evidence) -> tuple[float, ...]:
    divisor = None if evidence.beside is None else evidence.beside.divisor
    return (divisor, 1 / divisor) if divisor else ()


def _first(found: Sequence[Mismatch]) -> str:
    return f"loss {found[0].seen}, expected {found[0].expected}"


def _same(one: float, other: float) -> bool:
    return scalar_error(one, other) <= FP32.least
