"""Validating a case: run it on ranks, run the reference, and judge."""

from dataclasses import replace
from time import perf_counter

from validation.case import Case
from validation.judge import judge
from validation.observe import observe
from validation.verdict import Verdict
from validation.world import World


def validate(case: Case, world: World, *, measure: bool = False) -> Verdict:
    """The verdict on ``case``, run on ``world``'s ranks beside the reference; its ``seconds`` cover both.

    ``measure``: measure rounding floors even where every bit agrees. Raises what the world raises when there is
    nothing to judge: ``RankFailed`` for a rank that raised, died or hung, ``NeedsMoreRanks`` for too small a world.
    """
    began = perf_counter()
    verdict = judge(case, observe(case, world), measure=measure)
    return replace(verdict, seconds=perf_counter() - began)
