"""Validating a case: run it on ranks, run the reference, judge, and explain what is wrong."""

from dataclasses import replace
from time import perf_counter

from validation.case import Case
from validation.cause import Cause
from validation.diagnose import diagnose
from validation.judge import judge
from validation.observe import observe
from validation.observed import Observed
from validation.rank_report import Ending, RankFailed
from validation.verdict import Verdict
from validation.world import World


def validate(case: Case, world: World, *, measure: bool = False, explain: bool = True) -> Verdict:
    """The verdict on ``case``, run on ``world``'s ranks beside the reference; its ``seconds`` cover both.

    ``measure``: measure rounding floors even where every bit agrees. ``explain``: where something is wrong, run the
    case once more with every boundary tensor recorded, and name the cause. Raises what the world raises when there is
    nothing to judge: ``RankFailed`` for a rank that raised, died or hung, ``NeedsMoreRanks`` for too small a world.
    """
    began = perf_counter()
    observed = observe(case, world)
    verdict = judge(case, observed, measure=measure)
    if explain and verdict.verdict == "fail":
        verdict = explained(case, world, observed, verdict)
    return replace(verdict, seconds=perf_counter() - began)


def explained(case: Case, world: World, observed: Observed, verdict: Verdict) -> Verdict:
    """``verdict`` with its causes. The case runs again, recorded: a run that is right costs nothing."""
    try:
        recorded = observe(case, world, record=True)
        again = judge(case, recorded)
    except RankFailed:
        return replace(diagnose(case, observed, verdict), undecided=("not reproduced: run again, the ranks failed",))
    if again.mismatches != verdict.mismatches:
        missed = "not reproduced: a second, recorded run " + (
            "was right" if again.verdict == "pass" else "went wrong in another way"
        )
        found = diagnose(case, observed, verdict)
        return replace(found, undecided=(missed, "a race, or something else that is not seeded", *found.undecided))
    return diagnose(case, recorded, verdict)


def crashed(case: Case, failure: RankFailed | None) -> Verdict:
    """The verdict where ranks raised, died or hung: unknown, for a wrong answer was not seen."""
    verdict = Verdict(str(case), "unknown", "none", (), failure=str(failure), bindings=case.bindings)
    if failure is None:
        return verdict
    culprit = failure.reports[failure.culprit]
    stuck = culprit.ending in (Ending.STUCK, Ending.ABSENT) and culprit.waiting is not None
    timeout = "Timeout" in culprit.message.partition(":")[0]
    detail = culprit.sentence().partition("\n")[0]
    return replace(
        verdict, cause=(Cause("deadlock" if stuck or timeout else "crash", rank=culprit.rank, detail=detail),)
    )
