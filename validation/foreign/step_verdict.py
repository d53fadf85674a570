"""What becomes of a step once its ranks have handed it back: it is judged, and what is wrong with it explained."""

from collections.abc import Mapping
from dataclasses import replace

from pipeproof.diagnosis.diagnose import explained, sought
from pipeproof.diagnosis.evidence import Line
from pipeproof.foreign.assemble import Assembled
from pipeproof.foreign.call_matching import every_call, last_called, last_trained
from pipeproof.foreign.evidence import Beside, evidence_of
from pipeproof.foreign.holders import at_holders
from pipeproof.foreign.lines import from_the_first_wrong
from pipeproof.foreign.reference_run import ReferenceRun, SecondModel
from pipeproof.foreign.step_oracle import required_of
from pipeproof.foreign.task import Task
from pipeproof.judging.judge import judged, one_thread
from pipeproof.judging.verdict import Verdict
from pipeproof.observers.sketch import UNSOUGHT
from pipeproof.reference.accumulation import Accumulation

_OF_CALLS = ("microbatches", "boundaries")  # the laws that only calls of watched stages can break
_WARMED_UP = "each microbatch's last call counts: those before it left nothing in the gradients, which are right"
_LATEST = "each microbatch's last call counts: with those before it, more calls are unlike the reference's"


def judged_step(
    title: str, task: Task, found: Assembled, second: SecondModel, run: ReferenceRun, accumulation: Accumulation
) -> Verdict:
    """The verdict on what was ``found``, beside what the reference's ``run`` made."""
    batches, made = run.batches, run.made(found.owner)
    if other_loss := second.other_loss(made[0].loss, batches[0]):
        return random_reference(title, task, other_loss)
    if all(gradient is None for one in made for gradient in one.gradients.values()):
        return undecided(title, f"the reference {task.name} gives no parameter a gradient: there is nothing to compare")
    like = run.divided_late(found.owner, watched=found.watched) if accumulation.late else run
    like.made(found.owner)  # its places are known when it is done
    reference = like.reference(found.owner, found.copies, accumulation=accumulation)
    known = found.passages(like.places, like.note_handed_on)
    observed = found.observed(known)
    required = required_of(title, task, found, second, run=like, reference=reference, observed=observed)
    verdict = judged(required, observed)
    counted = every_call
    for which in (last_trained, last_called) if verdict.mismatches and found.watched else ():
        other = judged(required, found.observed(found.passages(like.places, like.note_handed_on, which=which)))
        if other.verdict == "pass" or _unlike(other) < _unlike(verdict):
            note = _WARMED_UP if other.verdict == "pass" else _LATEST
            verdict, counted = with_notes(other, {"microbatches": note}), which
    verdict = at_holders(_of_first_ranks(verdict), found, made)
    if found.watched and found.missed:
        verdict = with_notes(verdict, dict.fromkeys(_OF_CALLS, found.missed))
    if not verdict.mismatches:
        return verdict
    if like is not run:  # a cause is sought beside one that divides what each microbatch gives
        reference = run.reference(found.owner, found.copies, accumulation=accumulation)
    if like is not run or counted is not every_call:
        known = found.passages(run.places, run.note_handed_on, which=counted)
        observed = found.observed(known)
    if run.crash is not None:
        return verdict.without_cause(run.crash)
    beside = Beside(reference, second.model, batches, task.loss, made)
    lines = [Line(observed.along(number), flows) for number, flows in enumerate(known)]
    evidence = evidence_of(verdict, from_the_first_wrong(lines), found, beside)
    failed = {law.name for law in verdict.laws if law.outcome == "fail"}

    def told() -> Verdict:
        explanation = explained(evidence)
        if UNSOUGHT in explanation.undecided or evidence.members is None:
            return explanation
        notes = {law: note for law, note in evidence.members.notes().items() if law in failed}
        return with_notes(explanation, notes)

    with one_thread():
        return sought(verdict, told)


def _unlike(verdict: Verdict) -> int:
    """How many tensors of forwards are unlike the reference's, as where other data warmed stages up.

    Those of backwards say nothing: what is wrong with them may have gone into the gradients.
    """
    return sum(one.law == "boundaries" and "F" in (one.action or "") for one in verdict.mismatches)


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


def with_notes(verdict: Verdict, notes: Mapping[str, str]) -> Verdict:
    """``verdict``, with ``notes`` said at their laws."""
    laws = [
        replace(law, note="; ".join(filter(None, [law.note, notes[law.name]]))) if law.name in notes else law
        for law in verdict.laws
    ]
    return replace(verdict, laws=tuple(laws))


def random_reference(title: str, task: Task, how: str) -> Verdict:
    """The verdict where the reference is another each time."""
    return undecided(title, f"the reference {task.name} is random: {how}")


def undecided(title: str, sentence: str) -> Verdict:
    """The verdict where there is nothing to judge, and why."""
    return Verdict(title, "unknown", "none", (), headline=sentence)
