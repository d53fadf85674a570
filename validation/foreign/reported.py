"""The link of a foreign step's losses: are they reported otherwise than computed, or does nothing tell?

That gradients are right does not prove that the losses were: what no gradient comes from may be wrong in them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from validation.diagnosis.rules.report import report
from validation.foreign.step_facts import StepFacts
from validation.judging.cause import Cause
from validation.judging.tolerance import FP32, scalar_error
from validation.judging.verdict import Mismatch

NOT_TOLD = "losses are wrong and gradients right: they are reported otherwise than computed, or a part has no gradient"


def reported(facts: StepFacts) -> list[Cause]:
    """Losses that are others of the right ones, or all of them a multiple: then they were computed."""
    causes, found = report(facts), _numbers(facts)
    told = _told(found, facts) if causes else ""
    return [replace(cause, detail=f"{_first(found)}: {told}; gradients are right") for cause in causes if told]


def unreported(facts: StepFacts) -> Sequence[str]:
    """That nothing tells why losses are wrong; empty where none is, or where that is told."""
    return (NOT_TOLD,) if report(facts) and not reported(facts) else ()


def _numbers(facts: StepFacts) -> list[Mismatch]:
    found = [m for m in facts.verdict.mismatches if m.law == "loss"]
    return found if all(m.what == "number" and math.isfinite(_seen(m)) for m in found) else []


def _seen(mismatch: Mismatch) -> float:
    assert isinstance(mismatch.found, float), "a number was compared"
    return mismatch.found


def _told(found: Sequence[Mismatch], facts: StepFacts) -> str:
    """What the losses that were seen are, in terms of the right ones; empty if they are nothing that tells."""
    right = facts.expected.losses
    seen = list(map(_seen, found))
    if not found:
        return ""
    if found[0].microbatch is not None and all(any(_same(one, other) for other in right) for one in seen):
        return "those of other microbatches"
    ratios = [m.ratio for m in found if m.ratio is not None]
    one = ratios[0] if ratios else 1.0
    alike = len(ratios) == len(found) and all(_same(ratio, one) for ratio in ratios)
    count = facts.microbatches
    plain = any(_same(one, number) for number in (-1.0, count, 1 / count, facts.loss.divisor, 1 / facts.loss.divisor))
    if alike and (plain or len(found) == count > 1):
        return f"{one:.6g} times the right {'ones' if len(found) > 1 else 'one'}"
    reporting = [row[0] for row in facts.observed.ranks if row[0].loss is not None or row[0].losses]
    if facts.found.replicas.count == 1 and len({m.rank for m in found}) < len(reporting):
        return "other ranks report the right ones"
    return ""


def _first(found: Sequence[Mismatch]) -> str:
    return f"loss {found[0].seen}, expected {found[0].expected}"


def _same(one: float, other: float) -> bool:
    return scalar_error(one, other) <= FP32.least
