"""Microbatches that count several times in sums: they were added again, or multiplied, which sums do not tell apart."""

from collections.abc import Collection
from dataclasses import replace

from pipeproof.core.cause import Cause
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.limits import ALIKE
from pipeproof.observers.recording import RECEIVED


def told_apart(cause: Cause, evidence: Evidence) -> Cause:
    """``cause`` as what else was seen decides it: an output gradient, how often backwards ran, or the loss.

    A loss that is right says nothing: it may have been multiplied after it was reported. A loss that has the factor
    makes a multiplication likelier, but does not prove one: what runs again may be added to the loss, too.
    """
    if cause.kind != "doubled" or not cause.instead or cause.earlier:
        return cause
    (multiplied,) = cause.instead
    several = len(cause.microbatches) > 1
    if cause.factor == evidence.microbatches > 2 and _losses_are_right(evidence):
        return replace(multiplied, detail=cause.detail)  # it was not divided: by chance nothing is counted so often
    if _came_so(cause, evidence):
        return _with(multiplied, of=cause, told=f"the output gradient{'s are' if several else ' is'} so already")
    if cause.factor is None:
        return cause  # whole numbers, each another: more likely sums that were added again than weights
    ran = _ran(cause, evidence)
    if ran == {round(cause.factor)}:
        return replace(_with(cause, of=cause, told=f"the backward{'s' * several} ran {ran.pop()} times"), instead=())
    once = ran == {1} and cause.stage is None and not cause.stages  # one stage alone may have added it again
    if not once and not _losses_have(cause.factor, cause.microbatches, evidence):
        return cause
    told = f"the backward{'s' * several} ran once" if once else f"the loss{'es are' if several else ' is'} so, too"
    again = replace(cause, instead=(), detail="or what it gave was added once more")
    return replace(_with(multiplied, of=cause, told=told), instead=(again,))


def _with(cause: Cause, *, of: Cause, told: str) -> Cause:
    """``cause`` in the words of ``of``, and ``told``."""
    return replace(cause, detail="; ".join(filter(None, (of.detail, told))))


def _came_so(cause: Cause, evidence: Evidence) -> bool:
    """Whether the last stage concerned was seen to receive output gradients of that factor, of all microbatches."""
    last = max(_where(cause, evidence))
    came = {
        one.action.microbatch
        for one in (() if evidence.seen is None else evidence.seen.crossings(evidence.number))
        if (one.action.stage, one.where) == (last, RECEIVED)
        and _is(None if one.really is None else one.really.factor, cause.factor)
    }
    return came >= set(cause.microbatches)


def _is(seen: float | None, factor: float | None) -> bool:
    return seen is not None and factor is not None and abs(seen / factor - 1) <= ALIKE


def _losses_are_right(evidence: Evidence) -> bool:
    return any(law.name == "loss" and law.outcome == "pass" and law.checked for law in evidence.verdict.laws)


def _losses_have(factor: float | None, microbatches: Collection[int], evidence: Evidence) -> bool:
    """Whether the losses of ``microbatches``, and no others, are ``factor`` times what they should be."""
    wrong = [m for m in evidence.verdict.mismatches if m.law == "loss" and m.microbatch is not None]
    if factor is None or {m.microbatch for m in wrong} != set(microbatches):
        return False
    return all(_is(m.ratio, factor) for m in wrong)


def _ran(cause: Cause, evidence: Evidence) -> set[int]:
    """How often each stage concerned was seen to run backwards through each of the microbatches; empty if unseen."""
    where = _where(cause, evidence)
    if evidence.seen is None or not evidence.unseen.isdisjoint(where):
        return set()
    ran = evidence.seen.backwards(evidence.number)
    return {ran.get(stage, []).count(m) for stage in where for m in cause.microbatches}


def _where(cause: Cause, evidence: Evidence) -> Collection[int]:
    return cause.stages or (range(evidence.stages) if cause.stage is None else (cause.stage,))
