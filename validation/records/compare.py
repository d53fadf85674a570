"""Compare two records of the same steps: schedules, P and V may differ."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter

from pipeproof.core.comparison import leave_out
from pipeproof.core.judge import Where, conclude
from pipeproof.core.ledger import Ledger
from pipeproof.core.nudged import OtherProducts, doubt_rounding
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import JUDGED, Crash, Verdict
from pipeproof.explain.evidence import Evidence, failing
from pipeproof.explain.explain import explain_safely, explain_verdict
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
    expected: Record, observed: Record, *, rerun: str = "pipeproof compare FILE FILE", sides: tuple[str, str] = JUDGED
) -> Verdict:
    """Judge ``observed`` by ``expected``: operation by operation, up to the first mismatch.

    ``sides`` name the second and the first. ``RUNS`` get no causes: either may be wrong. Raises ``OtherSteps`` for
    different steps: other operations, microbatches or first weights.
    """
    began = perf_counter()
    observed, renamed = as_named_in(expected, as_numbered_in(expected, observed))
    _comparable(expected, observed)
    ledger = Ledger(LAWS)
    if renamed:
        ledger.remark("parameters-once", renamed)
    title = f"{observed.name} against {expected.name}" if sides == JUDGED else f"{expected.name} and {observed.name}"
    crash = _enter(expected, observed, ledger, sides)
    otherwise = Recorded(expected.operations[0]).precision
    verdict = conclude(ledger, title, otherwise=otherwise, rerun=rerun, seconds=perf_counter() - began)
    verdict = replace(verdict.before_its_end(crash), sides=sides)
    if not verdict.mismatches or not verdict.judged:
        return verdict
    others = OtherProducts.among(expected.products, [observed.products])
    verdict = doubt_rounding(verdict, expected.nudged, lambda _: others)
    return explain_safely(verdict, lambda: explain_verdict(evidence_of(verdict, expected, observed)))


def _enter(expected: Record, observed: Record, ledger: Ledger, sides: tuple[str, str]) -> Crash | None:
    """Enter all observations; return the error of an incomplete record."""
    compared = 0
    try:
        for number in range(len(expected.operations)):
            if ledger.failed:
                break  # later mismatches are consequences
            _compare(ledger, expected, observed, number)
            compared += 1
        for number in range(compared):  # last, or errors in a later operation would count as consequences
            reference = expected.operations[number]
            one = observed.operations[number]
            one = replace(one, parameters={}) if _no_update_expected(expected, observed) else one
            _leave_out(ledger, reference, one, number, sides)
            if reference.operation == "train" and reference.norm is None and not expected.framework:
                ledger.doubt("grad-norm", "there is no norm to compare with", Reason.UNREPORTED)
    except RecordError:
        raise
    except Exception as error:  # no one type: any program may have written it
        return Crash.of(error)
    every = [one for record in (expected, observed) for one in record.operations]
    if not _have_buffers(expected, observed):
        ledger.skip("buffers", "records of a framework's step have none")
    elif not any(one.buffers for one in every):
        ledger.skip("buffers", "the model has none")
    if _no_update_expected(expected, observed):
        ledger.skip("updated-parameters", "what is expected makes no update: it was recorded without an optimizer")
    elif not any(one.parameters for one in every):
        ledger.miss("updated-parameters", "neither record has weights that an optimizer moved")
    return None


def _no_update_expected(expected: Record, observed: Record) -> bool:
    """True for a framework's step beside a record without an optimizer."""
    return (
        bool(observed.framework)
        and expected.kind == "expected"
        and not any(one.parameters for one in expected.operations)
    )


def _have_buffers(*records: Record) -> bool:
    """True if all records include buffers."""
    return not any(one.framework for one in records)


def _leave_out(
    ledger: Ledger, expected: RecordedOperation, observed: RecordedOperation, number: int, sides: tuple[str, str]
) -> None:
    """Count and name results on only one side: not compared."""
    leave_out(
        ledger, expected, number=number, names=[name for name in expected.gradients if name in observed.gradients]
    )
    for law, one, other in (
        ("presence", expected.gradients, observed.gradients),
        ("gradient", expected.gradients, observed.gradients),
        ("updated-parameters", expected.parameters, observed.parameters),
    ):
        for side, names in zip(sides, (one.keys() - other.keys(), other.keys() - one.keys()), strict=True):
            why = f"nothing is {side} of it" if sides == JUDGED else f"{side} has nothing of it"
            ledger.leave_out(law, sorted(names), why)


def evidence_of(verdict: Verdict, expected: Record, observed: Record) -> Evidence:
    """Collect evidence for the first operation with a mismatch."""
    number = failing(verdict)
    reference, one, case = expected.operations[number], observed.operations[number], case_of(observed)
    gradients = {name: gradient for name, gradient in one.gradients.items() if name in reference.gradients}
    step = RecordedStep(
        reference,
        gradients,
        expected.before(number),
        [one.norm],
        observed.places or expected.places,
        number=number,
        max_norm=expected.max_norm if case is None or reference.operation != "train" else max_norm_of(case, number),
        model=None if case is None else partial(remade, case),
    )
    return step.evidence(verdict)


def _compare(ledger: Ledger, expected: Record, observed: Record, number: int) -> None:
    reference, one = expected.operations[number], observed.operations[number]
    at = against(reference, ledger, number=number)
    places = {name: found[0] for name, found in (observed.places or expected.places).items() if found}
    where = {name: Where(rank=rank, stage=stage) for name, (rank, stage) in places.items()}
    trained = one.operation == "train"
    if trained:
        known, counts = dict.fromkeys([*reference.before, *reference.gradients]), _counts(observed, one)
        for name in dict.fromkeys([*known, *counts]):
            at.count_holders(name, counts.get(name, 0), expected=int(name in known), **where.get(name, {}))
    at.losses(one.losses)
    if one.loss is not None:
        at.loss(one.loss)
    for name in dict.fromkeys([*reference.buffers, *one.buffers] if _have_buffers(expected, observed) else ()):
        at.buffer(name, one.buffers.get(name), **where.get(name, {}))
    if trained:
        stages = {name: stage for name, (_, stage) in places.items()}
        for name in upstream((name for name in reference.gradients if name in one.gradients), stages):
            at.gradient(name, one.gradients[name], **where.get(name, {}))
        if untold := [
            run.framework for run, its in ((expected, reference), (observed, one)) if run.framework and its.norm is None
        ]:
            ledger.miss("grad-norm", f"{untold[0]} reports none")
        else:
            at.norm(math.nan if one.norm is None else one.norm)
        for name in (name for name in reference.parameters if name in one.parameters):
            at.parameter(name, one.parameters[name], **where.get(name, {}))
    at.close()


def _comparable(expected: Record, observed: Record) -> None:
    plans = [[one.operation for one in record.operations] for record in (expected, observed)]
    if plans[0] != plans[1]:
        raise _refusal(expected, observed, f"operations {'+'.join(plans[0])} and {'+'.join(plans[1])}")
    for wanted, one in zip(expected.operations, observed.operations, strict=True):
        given = wanted.microbatches, one.microbatches
        if expected.framework or observed.framework:
            given = contents_of(wanted), contents_of(one)
        if found := other_microbatch(*given):
            raise _refusal(expected, observed, f"microbatches that are not the same: {found}")
    both = zip(expected.operations, observed.operations, strict=True)
    first = next(((wanted.before, one.before) for wanted, one in both if wanted.before), ({}, {}))
    if found := other_weights(*first):
        raise _refusal(expected, observed, f"weights that differ before the first step: {found}")


def _refusal(expected: Record, observed: Record, reason: str) -> OtherSteps:
    found = [f"{name} ({one}, {other})" for name, one, other in config_differences(expected, observed)]
    differ = f"; their configs differ in {first_few(found)}" if found else ""
    return OtherSteps(reason, differ)


def _counts(record: Record, operation: RecordedOperation) -> Mapping[str, int]:
    """Count the places of each parameter; one each without known places."""
    if record.framework:  # its replicas and tied copies hold a parameter several times
        return dict.fromkeys(record.places, 1)
    if record.places:
        return {name: len(found) for name, found in record.places.items()}
    return Counter({*operation.before, *operation.gradients})
