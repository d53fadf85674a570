"""Compare two records of the same steps: schedules, P and V may differ.

Two frameworks may give one parameter two names, and number microbatches differently, too: equal weights and equal
contents tell.
"""

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from torch import Tensor

from pipeproof.core.comparison import leave_out
from pipeproof.core.judge import conclude
from pipeproof.core.ledger import Ledger, Where
from pipeproof.core.nudged import OtherProducts, doubt_rounding
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import JUDGED, Crash, Verdict
from pipeproof.explain.evidence import Evidence, failing
from pipeproof.explain.explain import explain_safely, explain_verdict
from pipeproof.own.data import max_norm_of
from pipeproof.pipeline.sizes import first_few, some
from pipeproof.records.case_record import own_case, remade
from pipeproof.records.record import (
    LAWS,
    OtherSteps,
    Record,
    Recorded,
    RecordedOperation,
    RecordError,
    against,
    config_differences,
    digest,
    numbers_in,
    other_microbatch,
    other_weights,
    upstream,
)
from pipeproof.records.record_evidence import RecordedStep
from pipeproof.records.record_file import Addressed

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
    crash = None
    try:
        _enter(expected, observed, ledger, sides)
    except RecordError:
        raise
    except Exception as error:  # no one type: any program may have written it
        crash = Crash.of(error)
    otherwise = Recorded(expected.operations[0]).precision
    verdict = conclude(ledger, title, otherwise=otherwise, rerun=rerun, seconds=perf_counter() - began)
    verdict = replace(verdict.before_its_end(crash), sides=sides)
    if not verdict.mismatches or not verdict.judged:
        return verdict
    others = OtherProducts.among(expected.products, [observed.products])
    verdict = doubt_rounding(verdict, expected.nudged, lambda _: others)
    return explain_safely(verdict, lambda: explain_verdict(evidence_of(verdict, expected, observed)))


def _enter(expected: Record, observed: Record, ledger: Ledger, sides: tuple[str, str]) -> None:
    """Enter all observations, and what could not be compared."""
    without_update = expected.kind == "expected" and not any(one.parameters for one in expected.operations)
    no_update_expected = bool(observed.framework) and without_update  # a framework's step beside no optimizer
    pairs = list(zip(expected.operations, observed.operations, strict=True))
    compared = 0
    for number in range(len(pairs)):
        if ledger.failed:
            break  # later mismatches are consequences
        _compare(ledger, expected, observed, number)
        compared += 1
    for number, (wanted, one) in enumerate(pairs[:compared]):
        # At the end, or errors in a later operation would count as consequences.
        leave_out(ledger, wanted, number=number, names=[name for name in wanted.gradients if name in one.gradients])
        for law, known, other in (
            ("presence", wanted.gradients, one.gradients),
            ("gradient", wanted.gradients, one.gradients),
            ("updated-parameters", wanted.parameters, {} if no_update_expected else one.parameters),
        ):
            for side, names in zip(sides, (known.keys() - other.keys(), other.keys() - known.keys()), strict=True):
                why = f"nothing is {side} of it" if sides == JUDGED else f"{side} has nothing of it"
                ledger.leave_out(law, sorted(names), why)
        if wanted.operation == "train" and wanted.norm is None and not expected.framework:
            ledger.doubt("grad-norm", "there is no norm to compare with", Reason.UNREPORTED)
    every = [one for pair in pairs for one in pair]
    if expected.framework or observed.framework:
        ledger.skip("buffers", "records of a framework's step have none")
    elif not any(one.buffers for one in every):
        ledger.skip("buffers", "the model has none")
    if no_update_expected:
        ledger.skip("updated-parameters", "what is expected makes no update: it was recorded without an optimizer")
    elif not any(one.parameters for one in every):
        ledger.miss("updated-parameters", "neither record has weights that an optimizer moved")


def evidence_of(verdict: Verdict, expected: Record, observed: Record) -> Evidence:
    """Collect evidence for the first operation with a mismatch."""
    number, case = failing(verdict), None
    reference, one = expected.operations[number], observed.operations[number]
    with suppress(RecordError):
        case = own_case(observed)
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
    holders = observed.places or expected.places
    places = {name: found[0] for name, found in holders.items() if found}
    where = {name: Where(rank=rank, stage=stage) for name, (rank, stage) in places.items()}
    trained = one.operation == "train"
    if trained:
        # A framework's replicas and tied copies hold a parameter several times.
        counts = {name: 1 if observed.framework else len(found) for name, found in observed.places.items()}
        if not observed.framework and not counts:
            counts = dict.fromkeys([*one.before, *one.gradients], 1)
        at.count_holders(dict.fromkeys([*reference.before, *reference.gradients]), counts, holders)
    at.losses(one.losses)
    if one.loss is not None:
        at.loss(one.loss)
    without_buffers = expected.framework or observed.framework
    for name in () if without_buffers else dict.fromkeys([*reference.buffers, *one.buffers]):
        at.buffer(name, one.buffers.get(name), **where.get(name, {}))
    if trained:
        stages = {name: stage for name, (_, stage) in places.items()}
        for name in upstream((name for name in reference.gradients if name in one.gradients), stages):
            at.gradient(name, one.gradients[name], **where.get(name, {}))
        runs = (expected, reference), (observed, one)
        if untold := [run.framework for run, its in runs if run.framework and its.norm is None]:
            ledger.miss("grad-norm", f"{untold[0]} reports none")
        else:
            at.norm(math.nan if one.norm is None else one.norm)
        for name in (name for name in reference.parameters if name in one.parameters):
            at.parameter(name, one.parameters[name], **where.get(name, {}))
    at.close()


def _comparable(expected: Record, observed: Record) -> None:
    """Raise ``OtherSteps`` for other operations, microbatches or first weights."""
    plans = [[one.operation for one in record.operations] for record in (expected, observed)]
    reason = "" if plans[0] == plans[1] else f"operations {'+'.join(plans[0])} and {'+'.join(plans[1])}"
    pairs = list(zip(expected.operations, observed.operations, strict=False))
    framework = expected.framework or observed.framework
    for wanted, one in pairs if not reason else ():
        given = (contents_of(wanted), contents_of(one)) if framework else (wanted.microbatches, one.microbatches)
        if found := other_microbatch(*given):
            reason = reason or f"microbatches that are not the same: {found}"
    first = next(((wanted.before, one.before) for wanted, one in pairs if wanted.before), ({}, {}))
    if not reason and (found := other_weights(*first)):
        reason = f"weights that differ before the first step: {found}"
    if reason:
        fields = [f"{name} ({one}, {other})" for name, one, other in config_differences(expected, observed)]
        raise OtherSteps(reason, f"; their configs differ in {first_few(fields)}" if fields else "")


def as_named_in(expected: Record, observed: Record) -> tuple[Record, str]:
    """Rename ``observed`` to the names of ``expected``, and add a sentence if weights decided.

    Only frameworks' records need this; others share one model's names. Raises ``OtherSteps`` if weights do not identify
    parameters.
    """
    wanted, held = expected.operations[0].before, observed.operations[0].before
    if not (expected.framework or observed.framework) or not wanted or not held or wanted.keys() == held.keys():
        return observed, ""
    known, theirs = _contents(wanted), _contents(held)
    new = [name for name, content in theirs.items() if content not in known.values()]
    if new:
        said = f"weights that differ before the first step: no parameter of the first has those of {new[0]}"
        raise OtherSteps(said, "")
    if left := [name for name, content in known.items() if content not in theirs.values()]:
        raise OtherSteps(f"other parameters: the second has none that is {left[0]}", "")
    own = {name: name for name, content in theirs.items() if known.get(name) == content}
    holders = {content: name for name, content in known.items() if name not in own}
    names = own | {name: holders[content] for name, content in theirs.items() if name not in own and content in holders}
    many = Counter(known.values()) + Counter(theirs.values())
    alike = [name for name, content in theirs.items() if name not in own and many[content] != 2]
    if alike or len(known) != len(theirs):
        unknown = alike[0] if alike else next(name for name in theirs if name not in names)
        cure = "; record a later step, where no two weights are alike"
        raise OtherSteps(f"parameters of other names: weights do not tell which one {unknown} of the second is", cure)
    said = f"{some(len(names) - len(own), 'parameter')} of other names, matched by their weights"
    return _rename(observed, names), said


def as_numbered_in(expected: Record, observed: Record) -> Record:
    """Renumber microbatches of ``observed`` as in ``expected``, for a framework's record with equal contents.

    Replicas have their own order.
    """
    if not (expected.framework or observed.framework) or len(expected.operations) != len(observed.operations):
        return observed
    operations = []
    for wanted, one in zip(expected.operations, observed.operations, strict=True):
        numbers = numbers_in(contents_of(wanted), contents_of(one))
        if numbers is not None and numbers != sorted(numbers):
            order = [numbers.index(number) for number in range(len(numbers))]
            fields: dict[str, Any] = {
                name: tuple(found[place] for place in order)
                for name in ("microbatches", "contents", "losses")
                if (found := getattr(one, name))
            }
            floors = one.floors and replace(one.floors, losses=[one.floors.losses[place] for place in order])
            one = replace(one, **fields, floors=floors)
        operations.append(one)
    return replace(observed, operations=tuple(operations))


def contents_of(operation: RecordedOperation) -> tuple[str, ...]:
    """Content digests by microbatch; older framework records lack them."""
    return operation.contents or operation.microbatches


def _contents(weights: Mapping[str, Tensor]) -> dict[str, bytes | None]:
    if isinstance(weights, Addressed):
        return {name: None if one is None else one.encode() for name, one in weights.digests.items()}
    return {name: digest(weights[name]).encode() for name in weights}


def _rename(record: Record, names: Mapping[str, str]) -> Record:
    def by(found: Mapping[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): found[name] for name in found}

    def renamed(one: Any, *fields: str) -> Any:
        return None if one is None else replace(one, **{field: by(getattr(one, field)) for field in fields})

    operations = []
    for one in record.operations:
        floors = renamed(one.floors, "gradients", "updates")
        if floors is not None:
            floors = replace(floors, moved=renamed(floors.moved, "gradients", "leads", "updates"))
        operations.append(replace(renamed(one, "before", "gradients", "parameters"), floors=floors))
    return replace(record, operations=tuple(operations), places=by(record.places))
