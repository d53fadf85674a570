"""Validating a case: run it on ranks, run the reference, judge, explain what is wrong, and narrow it down."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from pipeproof.core.cause import Cause
from pipeproof.core.observe.observed import Observed
from pipeproof.core.verdict import Verdict
from pipeproof.explain.explain import sought
from pipeproof.own.case import Case
from pipeproof.own.faults import specimen, unchanged
from pipeproof.own.judgement import diagnose, judge
from pipeproof.own.observe import observe
from pipeproof.own.runtimes import OWN
from pipeproof.pipeline.laws import Violation
from pipeproof.pipeline.program import Program, lower
from pipeproof.pipeline.program_laws import violations as of_program
from pipeproof.pipeline.sizes import some
from pipeproof.worlds.rank_report import Ending, Race, RankFailed, RankReport, of_failure
from pipeproof.worlds.stall import lost_message, waiting_in
from pipeproof.worlds.world import World


def validate(case: Case, world: World, *, measure: bool = False, explain: bool = True) -> Verdict:
    """The verdict on ``case``, run on ``world``'s ranks beside the reference; its ``seconds`` cover both.

    ``measure``: measure rounding floors even where every bit agrees. ``explain``: where something is wrong, run the
    case once more with every boundary tensor recorded, and name the cause. Raises what the world raises when there is
    nothing to judge: ``RankFailed`` for a rank that raised, died or hung, ``NeedsMoreRanks`` for too small a world.
    """
    if (verdict := refusal(case)) is not None:
        return verdict
    began = perf_counter()
    observed = observe(case, world)
    verdict = judge(case, observed, measure=measure)
    if explain and verdict.verdict == "fail":
        verdict = explained(case, world, observed, verdict)
    return replace(verdict, seconds=perf_counter() - began)


def explained(case: Case, world: World, observed: Observed, verdict: Verdict) -> Verdict:
    """``verdict`` with its causes. The case runs again, recorded: a run that is right costs nothing."""
    if case.runtime != OWN:
        return replace(verdict, undecided=(f"the runtime {case.runtime} is not ours, and was not recorded",))
    return sought(verdict, lambda: _explained(case, world, observed, verdict))


def _explained(case: Case, world: World, observed: Observed, verdict: Verdict) -> Verdict:
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
    blank = Verdict(str(case), "unknown", "none", (), bindings=case.bindings)
    if failure is None:
        return blank
    if isinstance(failure.cause, Race):
        return of_failure(blank, failure)
    culprit = failure.reports[failure.culprit]
    stuck = culprit.ending in (Ending.STUCK, Ending.ABSENT) and culprit.waiting is not None
    if not (stuck or "Timeout" in culprit.message.partition(":")[0]):
        crash = Cause("crash", rank=culprit.rank, detail=_first_line(culprit))
        return replace(of_failure(blank, failure), cause=() if failure.hang else (crash,))  # one may compute for ever
    run = case.run
    program = run if isinstance(run, Program) else lower(run)
    told = RankFailed(waiting_in(program, failure.reports))
    return replace(of_failure(blank, told), cause=(_stalled(program, failure),))


def refused(case: Case, violations: Sequence[Violation]) -> Verdict:
    """The verdict where static laws refuse what the ranks were to run: nothing ran, and the cause is there to read.

    Laws come from what is computed to how it is sent, and the first that is broken is the cause: ranks that wait for
    each other are a consequence of whatever was wrong before.
    """
    first = violations[0]
    kind = "deadlock" if first.law in ("acyclic", "deadlock") else "order"
    cause = Cause(kind, rank=first.rank, detail=str(first))
    blank = Verdict(str(case), "fail", "none", (), cause=(cause,), bindings=case.bindings)
    said = f"nothing ran: the program breaks {some(len({one.law for one in violations}), 'law')}"
    return replace(blank, headline=said, failure="\n".join(map(str, violations)))


def refusal(case: Case) -> Verdict | None:
    """The verdict on a case whose specimen changes the program, where static laws refuse that; else None."""
    planted = specimen(case.specimen)
    if planted.reorder is unchanged:
        return None
    broken = list(of_program(planted.reorder(lower(case.built))))
    return refused(case, broken) if broken else None


def _stalled(program: Program, failure: RankFailed) -> Cause:
    culprit = failure.reports[failure.culprit]
    lost = lost_message(program, failure.reports)
    if lost is None:
        return Cause("deadlock", rank=culprit.rank, detail=_first_line(culprit))
    return Cause(
        "deadlock",
        rank=lost.rank,
        stage=lost.receive.stage,
        microbatches=(lost.receive.microbatch,),
        action=str(lost.receive),
        detail=str(lost),
    )


def _first_line(report: RankReport) -> str:
    return report.sentence().partition("\n")[0]


def narrow(case: Case, world: World) -> None:
    """Leave in ``world`` the least of what decides its runs under which ``case`` ends as it does now."""
    ended = _ending(case, world)
    world.reduce(lambda: _ending(case, world) == ended)


def _ending(case: Case, world: World) -> tuple[str, ...]:
    try:
        verdict = validate(case, world, explain=False)
    except RankFailed as failure:
        verdict = crashed(case, failure)
    return verdict.verdict, verdict.ended, *(cause.kind for cause in verdict.cause)
