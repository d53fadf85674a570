"""Two records of the same steps, held against each other: the schedules, P and V may be different ones."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter

from pipeproof.core.comparison import leave_out
from pipeproof.core.judge import Where, concluded
from pipeproof.core.ledger import Ledger
from pipeproof.core.nudged import OtherProducts, doubt_rounding
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import JUDGED, Crash, Verdict
from pipeproof.explain.evidence import Evidence, failing
from pipeproof.explain.explain import explained, sought
from pipeproof.own.data import max_norm_of
from pipeproof.pipeline.sizes import first_few
from pipeproof.records.case_record import case_of, remade
from pipeproof.records.record import (
    LAWS,
    OtherSteps,
    Record,
    Recorded,
    RecordedOperation,
    RecordError,
    against,
    config_differences,
    other_microbatch,
    other_weights,
    upstream,
)
from pipeproof.records.record_evidence import RecordedStep
from pipeproof.records.renamed import as_named_in, as_numbered_in, contents_of

RUNS = ("other", "one")  # two, neither of which is known to be right


def compare(
    expected: Record, seen: Record, *, rerun: str = "pipeproof compare FILE FILE", sides: tuple[str, str] = JUDGED
) -> Verdict:
    """The verdict on ``seen``, judged by ``expected``: operation by operation, up to the first that disagrees.

    ``sides`` are what the second and the first are called. Of ``RUNS`` no cause is sought: either may be wrong.
    Raises ``OtherSteps`` where the two are not of the same steps: other operations, microbatches or first weights.
    """
    began = perf_counter()
    seen, renamed = as_named_in(expected, as_numbered_in(expected, seen))
    _comparable(expected, seen)
    ledger = Ledger(LAWS)
    if renamed:
        ledger.remark("parameters-once", renamed)
    title = f"{seen.name} against {expected.name}" if sides == JUDGED else f"{expected.name} and {seen.name}"
    crash = _entered(expected, seen, ledger, sides)
    otherwise = Recorded(expected.operations[0]).precision
    verdict = concluded(ledger, title, otherwise=otherwise, rerun=rerun, seconds=perf_counter() - began)
    verdict = replace(verdict.before_its_end(crash), sides=sides)
    if not verdict.mismatches or not verdict.judged:
        return verdict
    others = OtherProducts.among(expected.products, [seen.products])
    verdict = doubt_rounding(verdict, expected.moved, lambda _: others)
    return sought(verdict, lambda: explained(evidence_of(verdict, expected, seen)))


def _entered(expected: Record, seen: Record, ledger: Ledger, sides: tuple[str, str]) -> Crash | None:
    """Enter all that was seen; what is raised by a record that lacks a part of what it should have."""
    compared = 0
    try:
        for number in range(len(expected.operations)):
            if ledger.failed:
                break  # what follows is consequence
            _compare(ledger, expected, seen, number)
            compared += 1
        for number in range(compared):  # last, or what is wrong in a later operation would be taken for a consequence
            due = expected.operations[number]
            one = seen.operations[number]
            one = replace(one, parameters={}) if _no_update_due(expected, seen) else one
            _leave_out(ledger, due, one, number, sides)
            if due.operation == "train" and due.norm is None and not expected.framework:
                ledger.doubt("grad-norm", "there is no norm to compare with", Reason.UNREPORTED)
    except RecordError:
        raise
    except Exception as error:  # no one type: who knows what wrote it
        return Crash.of(error)
    every = [one for record in (expected, seen) for one in record.operations]
    if not _have_buffers(expected, seen):
        ledger.skip("buffers", "nobody records those of a framework's step")
    elif not any(one.buffers for one in every):
        ledger.skip("buffers", "the model has none")
    if _no_update_due(expected, seen):
        ledger.skip("updated-parameters", "what is expected makes no update: it was recorded without an optimizer")
    elif not any(one.parameters for one in every):
        ledger.miss("updated-parameters", "neither record has weights that an optimizer moved")
    return None


def _no_update_due(expected: Record, seen: Record) -> bool:
    """Whether a framework's step is held against one that was recorded without an optimizer."""
    return (
        bool(seen.framework) and expected.kind == "expected" and not any(one.parameters for one in expected.operations)
    )


def _have_buffers(*records: Record) -> bool:
    """Whether all of them would tell of buffers, if there were any."""
    return not any(one.framework for one in records)


def _leave_out(
    ledger: Ledger, due: RecordedOperation, seen: RecordedOperation, number: int, sides: tuple[str, str]
) -> None:
    """Count and name what only one of ``sides`` has: it was not compared."""
    leave_out(ledger, due, number=number, names=[name for name in due.gradients if name in seen.gradients])
    for law, one, other in (
        ("presence", due.gradients, seen.gradients),
        ("gradient", due.gradients, seen.gradients),
        ("updated-parameters", due.parameters, seen.parameters),
    ):
        for side, names in zip(sides, (one.keys() - other.keys(), other.keys() - one.keys()), strict=True):
            why = f"nothing is {side} of it" if sides == JUDGED else f"{side} has nothing of it"
            ledger.leave_out(law, sorted(names), why)


def evidence_of(verdict: Verdict, expected: Record, seen: Record) -> Evidence:
    """What the cause of the first operation that disagrees is looked for in."""
    number = failing(verdict)
    due, one, case = expected.operations[number], seen.operations[number], case_of(seen)
    gradients = {name: gradient for name, gradient in one.gradients.items() if name in due.gradients}
    step = RecordedStep(
        due,
        gradients,
        expected.before(number),
        [one.norm],
        seen.places or expected.places,
        number=number,
        max_norm=expected.max_norm if case is None or due.operation != "train" else max_norm_of(case, number),
        model=None if case is None else partial(remade, case),
    )
    return step.evidence(verdict)


def _compare(ledger: Ledger, expected: Record, seen: Record, number: int) -> None:
    due, one = expected.operations[number], seen.operations[number]
    at = against(due, ledger, number=number)
    places = {name: found[0] for name, found in (seen.places or expected.places).items() if found}
    where = {name: Where(rank=rank, stage=stage) for name, (rank, stage) in places.items()}
    trained = one.operation == "train"
    if trained:
        known, counts = dict.fromkeys([*due.before, *due.gradients]), _counts(seen, one)
        for name in dict.fromkeys([*known, *counts]):
            at.held(name, counts.get(name, 0), due=int(name in known), **where.get(name, {}))
    at.losses(one.losses)
    if one.loss is not None:
        at.loss(one.loss)
    for name in dict.fromkeys([*due.buffers, *one.buffers] if _have_buffers(expected, seen) else ()):
        at.buffer(name, one.buffers.get(name), **where.get(name, {}))
    if trained:
        stages = {name: stage for name, (_, stage) in places.items()}
        for name in upstream((name for name in due.gradients if name in one.gradients), stages):
            at.gradient(name, one.gradients[name], **where.get(name, {}))
        if untold := [
            run.framework for run, its in ((expected, due), (seen, one)) if run.framework and its.norm is None
        ]:
            ledger.miss("grad-norm", f"{untold[0]} told none")
        else:
            at.norm(math.nan if one.norm is None else one.norm)
        for name in (name for name in due.parameters if name in one.parameters):
            at.parameter(name, one.parameters[name], **where.get(name, {}))
    at.close()


def _comparable(expected: Record, seen: Record) -> None:
    plans = [[one.operation for one in record.operations] for record in (expected, seen)]
    if plans[0] != plans[1]:
        raise _refused(expected, seen, f"operations {'+'.join(plans[0])} and {'+'.join(plans[1])}")
    for wanted, one in zip(expected.operations, seen.operations, strict=True):
        given = wanted.microbatches, one.microbatches
        if expected.framework or seen.framework:
            given = contents_of(wanted), contents_of(one)
        if found := other_microbatch(*given):
            raise _refused(expected, seen, f"microbatches that are not the same: {found}")
    both = zip(expected.operations, seen.operations, strict=True)
    first = next(((wanted.before, one.before) for wanted, one in both if wanted.before), ({}, {}))
    if found := other_weights(*first):
        raise _refused(expected, seen, f"weights that differ before the first step: {found}")


def _refused(expected: Record, seen: Record, reason: str) -> OtherSteps:
    found = [f"{name} ({one}, {other})" for name, one, other in config_differences(expected, seen)]
    differ = f"; their configs differ in {first_few(found)}" if found else ""
    return OtherSteps(reason, differ)


def _counts(record: Record, operation: RecordedOperation) -> Mapping[str, int]:
    """How many places hold each parameter; one each, where a record knows of no places."""
    if record.framework:  # its replicas and tied copies hold a parameter several times
        return dict.fromkeys(record.places, 1)
    if record.places:
        return {name: len(found) for name, found in record.places.items()}
    return Counter({*operation.before, *operation.gradients})
