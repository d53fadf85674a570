"""What becomes of a step once its ranks have handed it back: it is judged, and what is wrong with it explained."""

from collections.abc import Sequence
from dataclasses import replace

from pipeproof.core.judge import judged
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import LawResult, Verdict, overall
from pipeproof.foreign.holders import at_holders, with_notes
from pipeproof.foreign.operation_run import OperationRun, observed_of
from pipeproof.foreign.reference_run import SecondModel
from pipeproof.foreign.step_oracle import ROUTED, required_of
from pipeproof.foreign.task import Task

_OF_CALLS = ("microbatches", "boundaries")  # the laws that only calls of watched stages can break
_CHOSEN = "with the experts that were chosen, everything else is right: see the law routing"


def judged_runs(
    title: str, task: Task, runs: Sequence[OperationRun], second: SecondModel, *, halted: str = ""
) -> Verdict:
    """The verdict on what the ranks made of every operation; ``second``: another model of the first one.

    ``halted``: why the operations after ``runs`` are not compared.
    """
    first = runs[0]
    if other_loss := second.other_loss(first.made[0].loss, first.run.batches[0]):
        return random_reference(title, task, other_loss)
    if all(gradient is None for one in first.made for gradient in one.gradients.values()):
        return undecided(title, f"the reference {task.name} gives no parameter a gradient: there is nothing to compare")
    if unknown := _unknown_output(task, runs) or _unseen_sums(runs):
        return undecided(title, unknown)
    return _judged(title, task, [one.routed for one in runs] if task.routers else runs, second, halted)


def _first_wrong(verdict: Verdict) -> int:
    """The number of the first operation that is wrong."""
    return min((one.operation - 1 for one in verdict.mismatches if one.law != "parameters-once"), default=0)


def _judged(title: str, task: Task, runs: Sequence[OperationRun], second: SecondModel, halted: str) -> Verdict:
    """The verdict, with its cause; the reference chooses experts as the ranks did, as far as rounding explains that."""
    if runs[0].found.loss_scale is not None:  # types as narrow as fp16 round what is scaled otherwise
        runs = [replace(one, scale=runs[0].found.loss_scale.losses) for one in runs]
    following = [one.explained for one in runs] if task.routers else runs
    verdict = _compared(title, task, following, second, halted)
    number = _first_wrong(verdict)
    one = following[number]
    verdict = at_holders(_of_first_ranks(verdict), one.found, one.made)
    if runs[0].found.watched and runs[0].found.missed:
        verdict = with_notes(verdict, dict.fromkeys(_OF_CALLS, runs[0].found.missed))
    routed = tuple(one for one in verdict.mismatches if one.law in ROUTED)
    others = tuple(one for one in verdict.mismatches if one.law not in ROUTED)
    if not verdict.mismatches:
        return verdict
    if routed and _is_right(title, task, runs, second, halted):
        return replace(verdict, mismatches=(*routed, *others), undecided=(_CHOSEN,))
    if not others:
        return verdict
    from pipeproof.foreign.step_causes import Beside, explain  # what a right step needs nothing of

    beside = Beside.of(one, second.like(one.task), following[:number][::-1])
    found = explain(replace(verdict, mismatches=others), one, beside)
    laws = tuple(verdict.law(law.name) if law.name in ROUTED else law for law in found.laws)
    mismatches = (*found.mismatches, *routed) if found.cause else (*routed, *found.mismatches)
    return replace(found, laws=laws, mismatches=mismatches, verdict=overall(laws)) if routed else found


def _is_right(title: str, task: Task, runs: Sequence[OperationRun], second: SecondModel, halted: str) -> bool:
    """Whether the choices of experts alone are wrong: all else is what the reference gives with these."""
    try:
        played = _compared(title, task, [one.following for one in runs], second, halted)
    except Exception:  # no one type: it is the user's code that runs, and no verdict depends on it
        return False
    return not played.stopped and all(one.law in ROUTED for one in played.mismatches)


def _compared(title: str, task: Task, runs: Sequence[OperationRun], second: SecondModel, halted: str) -> Verdict:
    """The verdict on ``runs`` as they are."""
    observed = observed_of(runs, [one.passages() for one in runs])
    return judged(required_of(title, task, runs, second, observed, halted=halted), observed)


def _unknown_output(task: Task, runs: Sequence[OperationRun]) -> str:
    """What was handed back as an output that the reference has not, in words; empty where nothing was."""
    known = runs[0].made[0].outputs
    for rank, name in ((k, name) for one in runs for k, made in enumerate(one.found.made) for name in made.outputs):
        if name not in known:
            given = "which was not given" if task.named is None else f"which gives {', '.join(map(repr, known))}"
            return f"rank {rank} handed back an output {name!r}: expected one of those of outputs=, {given}"
    return ""


def _unseen_sums(runs: Sequence[OperationRun]) -> str:
    """Why nobody knows what gradients were added to, so that none can be compared; empty where that is known."""
    found = ((rank, made.unseen.get("gradient")) for one in runs for rank, made in enumerate(one.found.made))
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
