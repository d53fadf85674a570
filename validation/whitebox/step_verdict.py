"""Judge a custom step, and explain its fault."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from pipeproof.core.judge import judge_observed
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import LawResult, Verdict, overall
from pipeproof.reference.step import Contribution
from pipeproof.whitebox.assemble import Assembled
from pipeproof.whitebox.operation_run import Course, observe_runs
from pipeproof.whitebox.routing import Routing
from pipeproof.whitebox.step_oracle import ROUTED, requirements_of
from pipeproof.whitebox.task import Task

_OF_CALLS = ("microbatches", "boundaries")  # laws about watched calls alone
_FIRST_RANKS = "compared on the first rank of each stage alone, and replicas differ"
_CHOSEN = "with the experts that were chosen, everything else is right: see the law routing"


def judge(course: Course) -> Verdict:
    """Judge all operations in ``course``."""
    title, task, first = course.title, course.task, course.runs[0]
    if other_loss := course.second.other_loss(first.made[0].loss, first.run.batches[0]):
        return random_reference(title, task, other_loss)
    for why in _obstacles(course):
        return undecided_verdict(title, why)
    if task.routers:
        course = course.each(lambda one: replace(one, routing=Routing.of(one.found, one.made)))
    return _judge(course)


def _obstacles(course: Course) -> Iterator[str]:
    """Yield why nothing can be judged."""
    task, first = course.task, course.runs[0]
    if all(gradient is None for one in first.made for gradient in one.gradients.values()):
        yield f"the reference {task.name} gives no parameter a gradient: there is nothing to compare"
    known, made = first.made[0].outputs, [each for one in course.runs for each in enumerate(one.found.made)]
    for rank, name in ((rank, name) for rank, one in made for name in one.outputs if name not in known):
        given = "which was not given" if task.contract.outputs is None else f"which gives {', '.join(map(repr, known))}"
        yield f"rank {rank} handed back an output {name!r}: expected one of those of outputs=, {given}"
    for rank, why in ((rank, one.unseen["gradient"]) for rank, one in made if "gradient" in one.unseen):
        yield f"what rank {rank} added gradients to was not observed: {why}"


def _judge(course: Course) -> Verdict:
    """Judge with causes; the reference follows expert choices that rounding explains."""
    first = course.runs[0].found
    if (scale := first.loss_scale) is not None:  # fp16 and the like round scaled values otherwise
        course = course.each(lambda one: replace(one, scale=scale.losses))
    following = course.each(lambda one: one.explained) if course.task.routers else course
    verdict = _compare(following)
    number = min((one.operation - 1 for one in verdict.mismatches if one.law != "parameters-once"), default=0)
    now = following.runs[number]  # the first faulty operation
    verdict = _at_holders(verdict, now.found, now.made)
    laws = [*verdict.laws]
    for k, law in enumerate(laws):
        if (law.name, law.outcome) == ("gradient", "pass") and any(one.law == "replicas" for one in verdict.mismatches):
            laws[k] = replace(law, outcome="unknown", note=_FIRST_RANKS)
        if law.name in _OF_CALLS and first.watched and first.missed:
            laws[k] = replace(law, note="; ".join(filter(None, [law.note, first.missed])))
    verdict = replace(verdict, laws=tuple(laws))
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
    every = tuple(verdict.law(law.name) if law.name in ROUTED else law for law in found.laws)
    mismatches = (*found.mismatches, *routed) if found.causes else (*routed, *found.mismatches)
    return replace(found, laws=every, mismatches=mismatches, outcome=overall(every)) if routed else found


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
    placed = sorted(verdict.mismatches, key=lambda one: one.beside is not None)
    for k, one in enumerate(placed):
        if one.stage is None:
            continue
        if one.law in ("gradient", "presence") and one.parameter is not None and one.what != "text":
            parts = [each.gradients.get((one.stage, one.parameter)) for each in made]
            given = [each.cpu() for each in parts if each is not None]
            expected = torch.stack(given).sum(dim=0) if given else None
            placed[k] = replace(one, rank=found.holder((one.stage, one.parameter), expected))
        elif one.law == "initial-weights" and one.parameter is not None and one.beside is None:
            wrong = found.beginner((one.stage, one.parameter))
            placed[k] = one if wrong is None else replace(one, rank=wrong)
        elif one.law == "microbatches" and one.rank is not None and one.microbatch is None:
            lines = [found.made[rank].line for rank, _ in found.stages[one.stage].part.members]
            several = lines.count(found.made[one.rank].line) > 1
            placed[k] = replace(one, rank=None) if several else one
    return replace(verdict, mismatches=tuple(placed))
