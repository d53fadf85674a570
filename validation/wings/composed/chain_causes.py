"""The causes that a chain shows, and those that ranks found in their own gradients and weights, put together."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.rules.loss_scale import clipped_late
from pipeproof.observers.observed import INPUT, Passed
from pipeproof.observers.recording import GIVEN, HANDED_ON, MADE, RECEIVED
from pipeproof.wings.composed.chain import Chain

_NOT_RUN = "the stage did not run it, or not with gradients"
_OF_ALL = frozenset({"scale", "sign", "not-unscaled", "unscaled-twice", "scales-differ", "unscaled-after-norm"})


def of_calls(chain: Chain) -> list[Cause]:
    """The microbatches that no stage of ``chain`` ran, and those that every one ran several times."""
    lost = set[int].intersection(*(set(order.left) for order in chain.orders.values()))
    found = [Cause("dropped", microbatches=tuple(sorted(lost)), detail="no stage ran it")] if lost else []
    times = [Counter(order.numbers) for order in chain.orders.values()]
    again = tuple(m for m in range(chain.microbatches) if all(one[m] > 1 for one in times))
    more = any(len(order.numbers) > chain.microbatches for order in chain.orders.values())
    return (
        [*found, Cause("doubled", microbatches=again, detail="every stage ran it again")] if again and more else found
    )


def with_lost(causes: Sequence[Cause], chain: Chain) -> list[Cause]:
    """``causes``, and the microbatches that others ran, and a stage did not of which nothing else is known."""
    known = {stage for cause in causes for stage in (cause.stage, *cause.stages)}
    never = {m for cause in causes if cause.stage is None for m in cause.microbatches}
    found = list(causes)
    for stage, order in chain.orders.items():
        lost = tuple(m for m in order.left if m not in never)
        if lost and stage not in known and len(order.numbers) < chain.microbatches:
            rank = chain.stages[stage].rank
            found.append(Cause("dropped", rank=rank, stage=stage, microbatches=lost, detail=_NOT_RUN))
    return found


def with_own(shown: Sequence[Cause], own: Sequence[Cause], evidence: Evidence) -> list[Cause]:
    """``shown`` by the chain, and what ranks found on their ``own`` at other stages.

    Where both are of one stage, the chain's comes first in the flow; but what says less gives way: that a stage
    computed something else, or that weights moved otherwise where they alone are wrong, and not their master copies.
    """
    known = {cause.stage for cause in own}
    moved = [one for one in evidence.verdict.mismatches if one.law == "updated-parameters"]
    told = any(cause.kind == "master-weights" for cause in own) and all(one.what == "text" for one in moved)
    causes = [one for one in shown if not (one.kind == "computation" and one.stage in known)]
    causes = [one for one in causes if not (one.kind in ("update", "clip") and told)]
    places = {cause.stage for cause in causes} | {stage for cause in causes for stage in cause.stages}
    more = [cause for cause in own if cause.stage is None or cause.stage not in places]
    return [*causes, *_together([clipped_late(cause, evidence) for cause in more], evidence)]


def repeated(cause: Cause, flow: Passed, *, moved: bool) -> Cause:
    """``cause``; where a stage gave something else than it gives when it is repeated, what that shows.

    ``flow``: what passed it. ``moved``: its weights are others than those that the step began with.
    """
    made = any(not one.same and one.where in (MADE, HANDED_ON) for one in flow.crossings)
    if cause.kind != "computation" or not made or "B" in (cause.action or ""):
        return cause
    return replace(cause, kind="weights-changed" if moved else "not-repeatable")


def on_the_wire(cause: Cause, flow: Passed, *, last: int) -> Cause:
    """``cause``; what came in a narrower type than another stage sent it in was cast between the two.

    ``flow``: what passed its stage. What flows back to the ``last`` one comes from the loss.
    """
    wrong = [one for one in flow.crossings if str(one.action) == cause.action and not one.same]
    came = all(
        (one.where == GIVEN and not one.place.startswith(INPUT)) or (one.where == RECEIVED and cause.stage != last)
        for one in wrong
    )
    return replace(cause, kind="cast-on-wire") if cause.kind == "rounded" and wrong and came else cause


def _together(causes: Sequence[Cause], evidence: Evidence) -> list[Cause]:
    """``causes``; one that all stages have is of the whole step."""
    groups: dict[tuple[str, object], list[Cause]] = {}
    for cause in causes:
        of_all = cause.kind in _OF_ALL and cause.parameter is None
        told = (cause.detail, cause.microbatches) if of_all else str(cause)
        groups.setdefault((cause.kind, told), []).append(cause)
    found: list[Cause] = []
    for (kind, _), those in groups.items():
        everywhere = kind in _OF_ALL and {one.stage for one in those} == set(range(evidence.stages))
        found += [replace(those[0], rank=None, stage=None)] if everywhere and len(those) > 1 else those
    return found
