"""Judge a custom step, and explain its fault."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeproof.core.judge import judge_observed
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import LawResult, Mismatch, Verdict, overall
from pipeproof.reference.step import Contribution, Site
from pipeproof.whitebox.assemble import Assembled
from pipeproof.whitebox.operation_run import Course, observe_runs
from pipeproof.whitebox.step_oracle import ROUTED, requirements_of
from pipeproof.whitebox.task import Task

_OF_CALLS = ("microbatches", "boundaries")  # laws about watched calls alone
_CHOSEN = "with the experts that were chosen, everything else is right: see the law routing"


def judge(course: Course) -> Verdict:
    """Judge all operations in ``course``."""
    title, task, first = course.title, course.task, course.runs[0]
    if other_loss := course.second.other_loss(first.made[0].loss, first.run.batches[0]):
        return random_reference(title, task, other_loss)
    if all(gradient is None for one in first.made for gradient in one.gradients.values()):
        return undecided_verdict(
            title, f"the reference {task.name} gives no parameter a gradient: there is nothing to compare"
        )
    if unknown := _unknown_output(course) or _unseen_sums(course):
        return undecided_verdict(title, unknown)
    return _judge(course.each(lambda one: one.routed) if task.routers else course)


def _judge(course: Course) -> Verdict:
    """Judge with causes; the reference follows expert choices that rounding explains."""
    first = course.runs[0].found
    if (scale := first.loss_scale) is not None:  # fp16 and the like round scaled values otherwise
        course = course.each(lambda one: replace(one, scale=scale.losses))
    following = course.each(lambda one: one.explained) if course.task.routers else course
    verdict = _compare(following)
    number = min((one.operation - 1 for one in verdict.mismatches if one.law != "parameters-once"), default=0)
    now = following.runs[number]  # the first faulty operation
    verdict = _at_holders(_of_first_ranks(verdict), now.found, now.made)
    if first.watched and first.missed:
        verdict = _with_notes(verdict, dict.fromkeys(_OF_CALLS, first.missed))
    routed = tuple(one for one in verdict.mismatches if one.law in ROUTED)
    others = tuple(one for one in verdict.mismatches if one.law not in ROUTED)
    if not verdict.mismatches:
        return verdict
    if routed and _is_right(course):
        return replace(verdict, mismatches=(*routed, *others), undecided=(_CHOSEN,))
    if not others:
        return verdict
    from pipeproof.whitebox.evidence import explain  # what a right step needs nothing of

    model, before = course.second.like(now.task), following.runs[:number][::-1]
    found = explain(replace(verdict, mismatches=others), now, model, before)
    laws = tuple(verdict.law(law.name) if law.name in ROUTED else law for law in found.laws)
    mismatches = (*found.mismatches, *routed) if found.causes else (*routed, *found.mismatches)
    return replace(found, laws=laws, mismatches=mismatches, outcome=overall(laws)) if routed else found


def _is_right(course: Course) -> bool:
    """True if expert choices alone are wrong: all else agrees with the reference under these choices."""
    try:
        played = _compare(course.each(lambda one: one.following))
    except Exception:  # any type: user code runs here, and verdicts must not depend on it
        return False
    return not played.stopped and all(one.law in ROUTED for one in played.mismatches)


def _compare(course: Course) -> Verdict:
    """Judge the operations without causes."""
    observed = observe_runs(course.runs, [one.passages() for one in course.runs])
    return judge_observed(requirements_of(course, observed), observed)


def _unknown_output(course: Course) -> str:
    """Describe a returned output that the reference lacks; empty if none."""
    known, every = course.runs[0].made[0].outputs, (enumerate(one.found.made) for one in course.runs)
    for rank, name in ((rank, name) for made in every for rank, one in made for name in one.outputs):
        if name not in known:
            given = "which was not given" if course.task.named is None else f"which gives {', '.join(map(repr, known))}"
            return f"rank {rank} handed back an output {name!r}: expected one of those of outputs=, {given}"
    return ""


def _unseen_sums(course: Course) -> str:
    """Explain unknown starting gradients, which prevent a comparison; empty if known."""
    found = ((rank, made.unseen.get("gradient")) for one in course.runs for rank, made in enumerate(one.found.made))
    text = "what rank {} added gradients to was not observed: {}"
    return next((text.format(rank, why) for rank, why in found if why), "")


def _of_first_ranks(verdict: Verdict) -> Verdict:
    """Doubt right gradients where replicas differ: only first ranks were compared."""
    if all(one.law != "replicas" for one in verdict.mismatches):
        return verdict
    laws = [
        replace(law, outcome="unknown", note="compared on the first rank of each stage alone, and replicas differ")
        if (law.name, law.outcome) == ("gradient", "pass")
        else law
        for law in verdict.laws
    ]
    return replace(verdict, laws=tuple(laws))


def random_reference(title: str, task: Task, how: str) -> Verdict:
    """Return the verdict for a reference that changes between runs."""
    return undecided_verdict(title, f"the reference {task.name} is random: {how}")


def undecided_verdict(title: str, sentence: str, reasons: tuple[Reason, ...] = ()) -> Verdict:
    """Return an unknown verdict with its reason."""
    laws = (LawResult("comparable", "unknown", reasons=reasons),) if reasons else ()
    return Verdict(title, "unknown", "none", laws, headline=sentence)


def _at_holders(verdict: Verdict, found: Assembled, made: Sequence[Contribution]) -> Verdict:
    """Place parameter mismatches on a rank that holds the parameter.

    Comparisons with the model come first: between ranks, the other one may be wrong.
    """
    placed = [_at_holder(one, found, made) for one in verdict.mismatches]
    return replace(verdict, mismatches=tuple(sorted(placed, key=lambda one: one.beside is not None)))


def _at_holder(one: Mismatch, found: Assembled, made: Sequence[Contribution]) -> Mismatch:
    if one.stage is None:
        return one
    if one.law in ("gradient", "presence") and one.parameter is not None and one.what != "text":
        return replace(one, rank=found.holder((one.stage, one.parameter), _sum_at((one.stage, one.parameter), made)))
    if one.law == "initial-weights" and one.parameter is not None and one.beside is None:
        wrong = found.beginner((one.stage, one.parameter))
        return one if wrong is None else replace(one, rank=wrong)
    lines = [found.made[rank].line for rank, _ in found.stages[one.stage].part.members]
    several = one.rank is not None and lines.count(found.made[one.rank].line) > 1
    return replace(one, rank=None) if one.law == "microbatches" and several and one.microbatch is None else one


def _sum_at(site: Site, made: Sequence[Contribution]) -> Tensor | None:
    """Sum all microbatches' contributions at ``site``."""
    parts = [one.gradients.get(site) for one in made]
    given = [one.cpu() for one in parts if one is not None]
    return torch.stack(given).sum(dim=0) if given else None


def _with_notes(verdict: Verdict, notes: Mapping[str, str]) -> Verdict:
    """Append ``notes`` to their laws."""
    laws = [
        replace(law, note="; ".join(filter(None, [law.note, notes[law.name]]))) if law.name in notes else law
        for law in verdict.laws
    ]
    return replace(verdict, laws=tuple(laws))
