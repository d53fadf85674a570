"""Two records of the same steps, held against each other: the schedules, P and V may be different ones."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter

from torch import Tensor

from validation.cases.observe import max_norm_of
from validation.diagnosis.diagnose import sought
from validation.judging.ledger import Ledger
from validation.judging.tolerance import error, same_bits
from validation.judging.verdict import Crash, Tier, Verdict, overall
from validation.records.against import LAWS, Against
from validation.records.case_update import case_of, remade
from validation.records.movement import movements
from validation.records.record import Record, RecordedOperation, RecordError, config_differences
from validation.records.record_causes import caused
from validation.records.record_facts import RecordFacts, Seen

_SHOWN = 4  # differences of configs in a sentence


def compare(expected: Record, seen: Record, *, rerun: str = "pipeproof compare FILE FILE") -> Verdict:
    """The verdict on ``seen``, judged by ``expected``: operation by operation, up to the first that disagrees.

    Raises ``RecordError`` where the two are not of the same steps: other operations, microbatches or first weights.
    """
    began = perf_counter()
    _comparable(expected, seen)
    ledger = Ledger(LAWS)
    crash = _entered(expected, seen, ledger)
    title = f"{seen.name} against {expected.name}"
    verdict = concluded(ledger, title, rerun=rerun, seconds=perf_counter() - began)
    verdict = verdict.before_its_end(crash)
    if not verdict.mismatches:
        return verdict
    return sought(verdict, lambda: caused(facts_of(verdict, expected, seen)))


def _entered(expected: Record, seen: Record, ledger: Ledger) -> Crash | None:
    """Enter all that was seen; what is raised by a record that lacks a part of what it should have."""
    try:
        _enter(expected, seen, ledger)
    except RecordError:
        raise
    except Exception as error:  # no one type: who knows what wrote it
        return Crash.of(error)
    return None


def _enter(expected: Record, seen: Record, ledger: Ledger) -> None:
    places, whole = seen.places or expected.places, list[Callable[[], None]]()
    for number, (wanted, one) in enumerate(zip(expected.operations, seen.operations, strict=True)):
        if ledger.failed:
            break  # what follows is consequence
        at = Against(wanted, ledger, number=number, places=places)
        if one.operation == "train":
            at.held(_counts(seen, one))
        at.losses(one.losses)
        at.loss(one.loss)
        at.buffers(one.buffers)
        if one.operation == "train":
            at.gradients(one.gradients)
            at.norm(one.norm)
            at.parameters(one.parameters)
            whole.append(partial(at.whole, one))
    for doubt in whole:  # last, or what is wrong in a later operation would be taken for a consequence
        doubt()
    if not any(one.buffers for record in (expected, seen) for one in record.operations):
        ledger.skip("buffers", "the model has none")


def facts_of(verdict: Verdict, expected: Record, seen: Record) -> RecordFacts:
    """What the cause of the first operation that disagrees is looked for in."""
    number = min(mismatch.operation for mismatch in verdict.mismatches) - 1
    due, one, case = expected.operations[number], seen.operations[number], case_of(seen)
    gradients = {name: gradient for name, gradient in one.gradients.items() if name in due.gradients}
    wrong = {m.parameter for m in verdict.mismatches if m.law == "updated-parameters"}
    moved = movements({name: one.parameters[name] for name in wrong if name}, due.parameters, due.before)
    return RecordFacts(
        verdict,
        due,
        Seen(gradients, expected.before(number), [one.norm], moved),
        seen.places or expected.places,
        number=number,
        max_norm=expected.max_norm if case is None or due.operation != "train" else max_norm_of(case, number),
        model=None if case is None else partial(remade, case),
    )


def concluded(ledger: Ledger, config: str, *, rerun: str, seconds: float) -> Verdict:
    """The verdict that follows from all that was entered."""
    laws = ledger.laws()
    outcome = overall(laws)
    tier: Tier = "none" if outcome != "pass" else ("bitwise" if ledger.all_exact else "fp32")
    return Verdict(config, outcome, tier, laws, tuple(ledger.mismatches), seconds=seconds, rerun=rerun)


def other_weights(expected: Mapping[str, Tensor], seen: Mapping[str, Tensor]) -> str:
    """The first parameter, in the model's order, that is another before the step, and how far; empty if none is."""
    for name in (name for name in expected if name in seen):  # a record fetches what it is asked for
        one, wanted = seen[name].detach().cpu(), expected[name].cpu()
        if not same_bits(one, wanted):
            return f"{name} first, by a relative error of {error(one, wanted):.1e}"
    return ""


def other_microbatch(expected: Sequence[str], seen: Sequence[str]) -> str:
    """What is another in the microbatches, by their digests; empty if nothing is."""
    if len(expected) != len(seen):
        return f"{len(seen)} microbatches, not {len(expected)}"
    for number, (wanted, one) in enumerate(zip(expected, seen, strict=True)):
        if one != wanted:
            elsewhere = f": it has the content of microbatch {expected.index(one)}" if one in expected else ""
            return f"microbatch {number} first{elsewhere}"
    return ""


def _comparable(expected: Record, seen: Record) -> None:
    plans = [[one.operation for one in record.operations] for record in (expected, seen)]
    if plans[0] != plans[1]:
        raise _refused(expected, seen, f"operations {'+'.join(plans[0])} and {'+'.join(plans[1])}")
    for wanted, one in zip(expected.operations, seen.operations, strict=True):
        if found := other_microbatch(wanted.microbatches, one.microbatches):
            raise _refused(expected, seen, f"microbatches that are not the same: {found}")
    first = [next((one.before for one in record.operations if one.before), {}) for record in (expected, seen)]
    if found := other_weights(*first):
        raise _refused(expected, seen, f"weights that differ before the first step: {found}")


def _refused(expected: Record, seen: Record, reason: str) -> RecordError:
    found = [f"{name} ({one}, {other})" for name, one, other in config_differences(expected, seen)]
    differ = f"; their configs differ in {', '.join(found[:_SHOWN])}" if found else ""
    return RecordError(f"the records have {reason}{differ}; expected two records of the same steps")


def _counts(record: Record, operation: RecordedOperation) -> Mapping[str, int]:
    """How many places hold each parameter; one each, where a record knows of no places."""
    if record.places:
        return {name: len(found) for name, found in record.places.items()}
    return Counter({*operation.before, *operation.gradients})
