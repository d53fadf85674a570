"""Validate a case: run ranks, run the reference, judge, explain, narrow down."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from pipeproof.core.cause import Cause
from pipeproof.core.observe.observed import Observed
from pipeproof.core.verdict import Verdict
from pipeproof.explain.explain import explain_safely
from pipeproof.own.case import Case
from pipeproof.own.faults import pass_on, specimen
from pipeproof.own.judgement import diagnose, judge
from pipeproof.own.observe import observe
from pipeproof.own.runtimes import OWN
from pipeproof.pipeline.laws import Violation
from pipeproof.pipeline.program import Program, lower
from pipeproof.pipeline.program_laws import violations as of_program
from pipeproof.pipeline.sizes import some
from pipeproof.worlds.rank_report import Ending, Race, RankFailed, RankReport, of_failure
from pipeproof.worlds.stall import find_lost_message, waiting_in
from pipeproof.worlds.world import Decision, World


def validate(case: Case, world: World, *, measure: bool = False, explain: bool = True) -> Verdict:
    """Validate ``case`` on ``world``'s ranks beside the reference; ``seconds`` covers both.

    ``measure``: measure rounding floors even where every bit agrees. ``explain``: after a fault, repeat the case with
    all boundary tensors recorded, and name the cause. Raises the world's errors if there is nothing to judge:
    ``RankFailed`` for a rank that raised, died or hung, ``NeedsMoreRanks`` for too small a world.
    """
    return run_case(case, world, measure=measure, explain=explain)[0]


def run_case(
    case: Case, world: World, *, measure: bool = False, explain: bool = True
) -> tuple[Verdict, Observed | None]:
    """The verdict of ``validate``, and what ranks gave; None where static laws refuse the case, and nothing ran."""
    if (refused := refusal(case)) is not None:
        return refused, None
    began = perf_counter()
    observed = observe(case, world)
    verdict = judge(case, observed, measure=measure)
    if explain and verdict.outcome == "fail":
        verdict = explain_case(case, world, observed, verdict)
    return replace(verdict, seconds=perf_counter() - began), observed


def explain_case(case: Case, world: World, observed: Observed, verdict: Verdict) -> Verdict:
    """Add causes to ``verdict``. The case runs again with recording: right runs cost nothing extra."""
    if case.runtime != OWN:
        return replace(verdict, undecided=(f"the runtime {case.runtime} is not ours, and was not recorded",))
    return explain_safely(verdict, lambda: _explain(case, world, observed, verdict))


def _explain(case: Case, world: World, observed: Observed, verdict: Verdict) -> Verdict:
    try:
        recorded = observe(case, world, record=True)
        again = judge(case, recorded)
    except RankFailed:
        return replace(diagnose(case, observed, verdict), undecided=("not reproduced: run again, the ranks failed",))
    if again.mismatches != verdict.mismatches:
        missed = "not reproduced: a second, recorded run " + (
            "was right" if again.outcome == "pass" else "went wrong in another way"
        )
        found = diagnose(case, observed, verdict)
        return replace(found, undecided=(missed, "a race, or something else that is not seeded", *found.undecided))
    return diagnose(case, recorded, verdict)


def run_to_end(case: Case, world: World, **how: bool) -> tuple[Verdict, Observed | None]:
    """As ``run_case``; where ranks fail, their crash is the verdict."""
    try:
        return run_case(case, world, **how)
    except RankFailed as failure:
        return crash_verdict(case, failure), None


def crash_verdict(case: Case, failure: RankFailed) -> Verdict:
    """Return the verdict for ranks that raised, died or hung: unknown, without any observed wrong answer."""
    blank = Verdict(str(case), "unknown", "none", (), bindings=case.bindings)
    if isinstance(failure.cause, Race):
        return of_failure(blank, failure)
    culprit = failure.reports[failure.culprit]
    stuck = culprit.ending in (Ending.STUCK, Ending.ABSENT) and culprit.waiting is not None
    if not (stuck or "Timeout" in culprit.message.partition(":")[0]):
        crash = Cause("crash", rank=culprit.rank, detail=_first_line(culprit))
        return replace(of_failure(blank, failure), causes=() if failure.hang else (crash,))  # one may compute for ever
    program = case.run if isinstance(case.run, Program) else lower(case.run)
    waiting = of_failure(blank, RankFailed(waiting_in(program, failure.reports)))
    lost = find_lost_message(program, failure.reports)
    if lost is None:
        return replace(waiting, causes=(Cause("deadlock", rank=culprit.rank, detail=_first_line(culprit)),))
    receive = lost.receive
    cause = Cause("deadlock", rank=lost.rank, stage=receive.stage, action=str(receive), detail=str(lost))
    return replace(waiting, causes=(replace(cause, microbatches=(receive.microbatch,)),))


def decided_by(verdict: Verdict, decision: Decision | None) -> Verdict:
    """``verdict``, whose replay line names what decided the run which it is of."""
    return verdict if decision is None else replace(verdict, rerun=f"{verdict.replay} {decision.options}")


def refusal_verdict(case: Case, violations: Sequence[Violation]) -> Verdict:
    """Return the verdict for a program that static laws refuse: nothing ran, and the cause is evident.

    Laws go from computation to messages, and the first broken one is the cause: deadlocks follow from earlier
    faults.
    """
    first = violations[0]
    kind = "deadlock" if first.law in ("acyclic", "deadlock") else "order"
    cause = Cause(kind, rank=first.rank, detail=str(first))
    blank = Verdict(str(case), "fail", "none", (), causes=(cause,), bindings=case.bindings)
    said = f"nothing ran: the program breaks {some(len({one.law for one in violations}), 'law')}"
    return replace(blank, headline=said, failure="\n".join(map(str, violations)))


def refusal(case: Case) -> Verdict | None:
    """Return the verdict for a specimen whose program static laws refuse, or None."""
    planted = specimen(case.specimen)
    if planted.reorder is pass_on:
        return None
    broken = list(of_program(planted.reorder(lower(case.built))))
    return refusal_verdict(case, broken) if broken else None


def _first_line(report: RankReport) -> str:
    return report.sentence().partition("\n")[0]


def narrow(case: Case, world: World) -> None:
    """Reduce ``world``'s decisions to the least that reproduces this ending."""
    ended = _ending(case, world)
    world.reduce(lambda: _ending(case, world) == ended)


def _ending(case: Case, world: World) -> tuple[str, ...]:
    verdict, _ = run_to_end(case, world, explain=False)
    return verdict.outcome, verdict.ended, *(cause.kind for cause in verdict.causes)
