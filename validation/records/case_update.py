"""The step of a recorded case as attribution sees it: a case says all that made its numbers, so it is remade."""

from dataclasses import replace

from validation.cases.case import Case, CaseError
from validation.cases.judgement import setup_of
from validation.cases.observe import data_for, model_for
from validation.diagnosis.attribution import update_of
from validation.diagnosis.flow import play
from validation.diagnosis.update import Update
from validation.judging.tolerance import same_bits
from validation.records.case_record import digests_of
from validation.records.record import Record
from validation.records.record_evidence import Step


def case_of(record: Record) -> Case | None:
    """The case that ``record`` is of.

    None where it names none, or where this machine gives that other weights or microbatches than were recorded.
    """
    text = record.config.get("case")
    try:
        case = Case.parse(text) if isinstance(text, str) else None
    except CaseError:
        return None
    return case if case is not None and _same(record, case) else None


def remade(case: Case, step: Step) -> Update:
    """``step``, made once more on one device."""
    setup = setup_of(case)
    return replace(update_of(setup, step.gradients, play(setup, None, step.number)), expected=step.expected.gradients)


def _same(record: Record, case: Case) -> bool:
    if [one.operation for one in record.operations] != list(case.plan):
        return False
    known = dict(model_for(case).named_parameters(remove_duplicate=False))
    first = record.operations[0]
    begun = all(name in known and same_bits(known[name].detach(), one) for name, one in first.before.items())
    numbered = enumerate(record.operations)
    return begun and all(one.microbatches == digests_of(data_for(case, number)) for number, one in numbered)
