"""A case's records: from the reference, from a run, and a recorded step remade on one device."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from pipeproof.core.floors import Floors
from pipeproof.core.judge import one_thread
from pipeproof.core.measured import versions
from pipeproof.core.observe.observed import Observed, RankOperation
from pipeproof.core.tolerance import same_bits
from pipeproof.core.updates import Pending
from pipeproof.explain.atoms import Update
from pipeproof.explain.attribution import update_of
from pipeproof.explain.played import play
from pipeproof.own.case import Case
from pipeproof.own.data import data_for, max_norm_of, model_for
from pipeproof.own.judgement import setup_of
from pipeproof.own.stages import owners
from pipeproof.pipeline.action import GIVES_WEIGHT_GRADIENT
from pipeproof.records.record import (
    RankStage,
    Record,
    RecordedFloors,
    RecordedOperation,
    RecordError,
    microbatch_digests,
)
from pipeproof.records.record_evidence import RecordedStep
from pipeproof.reference.data import Batch
from pipeproof.reference.step import Recipe, Reference, Site
from pipeproof.worlds.accelerator import deterministic, first_of

Value = TypeVar("Value")


def record_expected(case: Case) -> Record:
    """Record a correct run of ``case``, with rounding floors. Gradients are added in its schedule's order.

    Runs on one device: no rank is started.
    """
    device = first_of(case.device)
    deterministic(case.device)
    with one_thread():
        model = model_for(case).to(device)
        owner = owners(model, case.split)
        reference = Reference(model, owner=owner, recipe=Recipe(loss=case.loss))
        orders, pending, done = backwards_of(case), list[Pending](), []
        for number, name in enumerate(case.plan):
            batches = [batch.to(device) for batch in data_for(case, number)]
            expected = reference.perform(name, batches, orders=orders, max_norm=max_norm_of(case, number))
            pending += [Pending(expected, batches, orders)] if name != "eval" else []
            floors = None
            if name == "train":
                floors = RecordedFloors.measure(expected, Floors(reference, tuple(pending)), moved=True)
                pending.clear()
            done.append(RecordedOperation.of(expected, digests_of(batches), floors=floors))
    placement = case.built.placement
    places = {name: ((placement[stage], stage),) for name, stage in owner.items()}
    return Record("expected", config_of(case), tuple(done), places)


def record_observed(case: Case, observed: Observed) -> Record:
    """Record a case's observed run."""
    places: dict[str, list[RankStage]] = {}
    for rank, operations in enumerate(observed.ranks):
        for stage, name in operations[-1].parameters or {}:
            places.setdefault(name, []).append((rank, stage))
    done, before = list[RecordedOperation](), _by_name(observed.initial_parameters())
    for number in range(len(case.plan)):
        last: RankOperation = observed.ranks[observed.schedule.placement[-1]][number]
        parameters = _by_name(observed.parameters(number))
        done.append(
            RecordedOperation(
                last.operation,
                digests_of(data_for(case, number)),
                last.losses,
                last.loss,
                last.norm,
                before=before if last.operation != "eval" else {},
                gradients=_by_name(observed.gradients(number)),
                parameters=parameters,
                buffers={name: buffer for (_, name), buffer in observed.buffers(number).items()},
            )
        )
        before = {**before, **parameters} if last.operation == "train" else before
    return Record("observed", config_of(case), tuple(done), {name: tuple(found) for name, found in places.items()})


def backwards_of(case: Case) -> dict[int, list[int]]:
    """For each stage, list microbatches in the order of their weight gradients in the case's schedule."""
    schedule = case.built
    return {
        stage: [
            action.microbatch
            for action in schedule.ranks[rank]
            if action.stage == stage and action.kind in GIVES_WEIGHT_GRADIENT
        ]
        for stage, rank in enumerate(schedule.placement)
    }


def config_of(case: Case) -> dict[str, object]:
    """Build a record's header: a case's line, its config, and the versions behind its numbers."""
    return {"case": str(case), **case.config, **versions()}


def digests_of(batches: Sequence[Batch]) -> tuple[str, ...]:
    """Digest each microbatch."""
    return microbatch_digests([(batch.inputs, batch.target) for batch in batches])


def _by_name(found: Mapping[Site, Value]) -> dict[str, Value]:
    """Key by name alone; a parameter in several stages comes from the lowest."""
    return {name: value for (_, name), value in sorted(found.items(), key=lambda item: item[0], reverse=True)}


def own_case(record: Record) -> Case:
    """Return the record's case.

    Raises ``RecordError`` if it names none, or if this machine gives that case other weights or microbatches.
    """
    text = record.config.get("case")
    if not isinstance(text, str):
        raise RecordError("it names no case, and what a model of one's own should give is not computed here")
    try:
        case = Case.parse(text)
    except ValueError as error:  # the line is none, or the schedule's file is gone
        raise RecordError(f"its case is none here: {error}") from error
    known = dict(model_for(case).named_parameters(remove_duplicate=False))
    first, other = record.operations[0].before, ""
    if [one.operation for one in record.operations] != list(case.plan):
        other = "operations"
    elif not all(name in known and same_bits(known[name].detach(), one) for name, one in first.items()):
        other = "weights"
    elif any(one.microbatches != digests_of(data_for(case, k)) for k, one in enumerate(record.operations)):
        other = "microbatches"
    if other:
        raise RecordError(f"it began with other {other} than its config gives on this machine")
    return case


def remade(case: Case, step: RecordedStep) -> Update:
    """Run ``step`` again on one device."""
    setup = setup_of(case)
    return replace(update_of(setup, step.gradients, play(setup, None, step.number)), expected=step.expected.gradients)
