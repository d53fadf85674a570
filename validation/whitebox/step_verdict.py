"""What becomes of a step once its ranks have handed it back: it is judged, and what is wrong with it explained."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipeproof.core.judge import judged
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import LawResult, Mismatch, Verdict, overall
from pipeproof.reference.step import Contribution, Site
from pipeproof.whitebox.assemble import Assembled
from pipeproof.whitebox.operation_run import Course, observed_of
from pipeproof.whitebox.step_oracle import ROUTED, required_of
from pipeproof.whitebox.task import Task

_OF_CALLS = ("microbatches", "boundaries")  # the laws that only calls of watched stages can break
_CHOSEN = "with the experts that were chosen, everything else is right: see the law routing"


def judge(course: Course) -> Verdict:
    """The verdict on what the ranks made of every operation of ``course``."""
    title, task, first = course.title, course.task, course.runs[0]
    if other_loss := course.second.other_loss(first.made[0].loss, first.run.batches[0]):
        return random_reference(title, task, other_loss)
    if all(gradient is None for one in first.made for gradient in one.gradients.values()):
        return undecided(title, f"the reference {task.name} gives no parameter a gradient: there is nothing to compare")
    if unknown := _unknown_output(course) or _unseen_sums(course):
        return undecided(title, unknown)
    return _judged(course.each(lambda one: one.routed) if task.routers else course)


def _judged(course: Course) -> Verdict:
    """The verdict, with its cause; the reference chooses experts as the ranks did, as far as rounding explains that."""
    first = course.runs[0].found
    if (scale := first.loss_scale) is not None:  # types as narrow as fp16 round what is scaled otherwise
        course = course.each(lambda one: replace(one, scale=scale.losses))
    following = course.each(lambda one: one.explained) if course.task.routers else course
    verdict = _compared(following)
    number = min((one.operation - 1 for one in verdict.mismatches if one.law != "parameters-once"), default=0)
    now = following.runs[number]  # the first that is wrong
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
    mismatches = (*found.mismatches, *routed) if found.cause else (*routed, *found.mismatches)
    return replace(found, laws=laws, mismatches=mismatches, verdict=overall(laws)) if routed else found


def _is_right(course: Course) -> bool:
    """Whether the choices of experts alone are wrong: all else is what the reference gives with these."""
    try:
        played = _compared(course.each(lambda one: one.following))
    except Exception:  # no one type: it is the user's code that runs, and no verdict depends on it
        return False
    return not played.stopped and all(one.law in ROUTED for one in played.mismatches)


def _compared(course: Course) -> Verdict:
    """The verdict on the operations as they are."""
    observed = observed_of(course.runs, [one.passages() for one in course.runs])
    return judged(required_of(course, observed), observed)


def _unknown_output(course: Course) -> str:
    """What was handed back as an output that the reference has not, in words; empty where nothing was."""
    known, every = course.runs[0].made[0].outputs, (enumerate(one.found.made) for one in course.runs)
    for rank, name in ((rank, name) for made in every for rank, one in made for name in one.outputs):
        if name not in known:
            given = "which was not given" if course.task.named is None else f"which gives {', '.join(map(repr, known))}"
            return f"rank {rank} handed back an output {name!r}: expected one of those of outputs=, {given}"
    return ""


def _unseen_sums(course: Course) -> str:
    """Why it is not known what gradients were added to, so that none can be compared; empty where that is known."""
    found = ((rank, made.unseen.get("gradient")) for one in course.runs for rank, made in enumerate(one.found.made))
    told = "what rank {} added gradients to was not seen: {}"
    return next((told.format(rank, why) for rank, why in found if why), "")


def _of_first_ranks(verdict: Verdict) -> Verdict:
    """``verdict``; where replicas differ, gradients that are right on the first ranks do not pass."""
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
    """The verdict where the reference is another each time."""
    return undecided(title, f"the reference {task.name} is random: {how}")


def undecided(title: str, sentence: str, reasons: tuple[Reason, ...] = ()) -> Verdict:
    """The verdict where there is nothing to judge, and why."""
    laws = (LawResult("comparable", "unknown", reasons=reasons),) if reasons else ()
    return Verdict(title, "unknown", "none", laws, headline=sentence)


def _at_holders(verdict: Verdict, found: Assembled, made: Sequence[Contribution]) -> Verdict:
    """``verdict``; what is wrong with a parameter is placed on a rank that holds it.

    What is held against the model comes first: where ranks differ, the one that the others are held against may be it.
    """
    placed = [_at_holder(one, found, made) for one in verdict.mismatches]
    return replace(verdict, mismatches=tuple(sorted(placed, key=lambda one: one.beside is not None)))


def _at_holder(one: Mismatch, found: Assembled, made: Sequence[Contribution]) -> Mismatch:
    if one.stage is None:
        return one
    if one.law in ("gradient", "presence") and one.parameter is not None and one.what != "text":
        return replace(one, rank=found.holder((one.stage, one.parameter), _expected((one.stage, one.parameter), made)))
    if one.law == "initial-weights" and one.parameter is not None and one.beside is None:
        wrong = found.beginner((one.stage, one.parameter))
        return one if wrong is None else replace(one, rank=wrong)
    lines = [found.made[rank].line for rank, _ in found.stages[one.stage].part.members]
    several = one.rank is not None and lines.count(found.made[one.rank].line) > 1
    return replace(one, rank=None) if one.law == "microbatches" and several and one.microbatch is None else one


def _expected(site: Site, made: Sequence[Contribution]) -> Tensor | None:
    """What all microbatches give there."""
    parts = [one.gradients.get(site) for one in made]
    given = [one.cpu() for one in parts if one is not None]
    return torch.stack(given).sum(dim=0) if given else None


def _with_notes(verdict: Verdict, notes: Mapping[str, str]) -> Verdict:
    """``verdict``, with ``notes`` said at their laws."""
    laws = [
        replace(law, note="; ".join(filter(None, [law.note, notes[law.name]]))) if law.name in notes else law
        for law in verdict.laws
    ]
    return replace(verdict, laws=tuple(laws))
