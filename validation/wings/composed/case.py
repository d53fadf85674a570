"""A case of our own runtime, whose steps are held against themselves, link by link, in place of a reference."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

from pipeproof.cases.case import Case, CaseError
from pipeproof.cases.data import data_for, max_norm_of, model_for
from pipeproof.cases.observe import assemble, planted
from pipeproof.cases.runtimes import OWN
from pipeproof.cases.specimens import PLUGINS, specimen
from pipeproof.cases.validator import refusal
from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.observers.wrappers import Steps
from pipeproof.pipeline.step import PipelineSchedule
from pipeproof.pipeline.waiting import DEFAULT_TIMEOUT_S
from pipeproof.records.checked_step import looked_at
from pipeproof.reference.data import Batch
from pipeproof.reference.step import Recipe, objective
from pipeproof.wings.composed.check import ComposedCheck
from pipeproof.wings.composed.step import Composed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World


def validate_composed(case: Case, world: World) -> Verdict:
    """The verdict on ``case``, run on ``world``'s ranks: on its first update that is not right, else on its last.

    Evaluation is not compared, nor what the optimizer does. Raises what ``validate`` raises.
    """
    if (verdict := refusal(case)) is not None:
        return verdict
    began = perf_counter()
    rows: list[list[Verdict]] = world.run(checked_rank, case, PLUGINS.files, ranks=case.processes)
    found = next((one for one in rows[0] if one.verdict != "pass"), rows[0][-1])
    return replace(found, config=str(case), bindings=case.bindings, rerun="", seconds=perf_counter() - began)


def check_composed(case: Case) -> None:
    """Raise ``CaseError`` for a case that cannot be held against itself."""
    if case.runtime != OWN:
        raise CaseError(f"--check composed with runtime {case.runtime}: expected a case of our own runtime")
    if case.replicas > 1:
        raise CaseError(f"--check composed with {case.replicas} replicas: expected a pipeline alone")


def checked_rank(context: RankContext, case: Case, plugins: Sequence[str]) -> list[Verdict]:
    """One rank's part of ``case``; a job for ``World.run``: a verdict on each update."""
    for file in plugins:
        PLUGINS.load(file)
    model, schedule = assemble(context, case)
    checks, verdicts, begun = list[ComposedCheck](), list[Verdict](), 0
    schedule = planted(case, schedule).wrapped(partial(looked_at, look=lambda: checks[-1].gradients()))
    steps = specimen(case.specimen).drive(schedule)
    for update in (k for k, name in enumerate(case.plan) if name == "train"):
        numbers, begun = range(begun, update + 1), update + 1
        batches = {k: [batch.to(context.device) for batch in data_for(case, k)] for k in numbers}
        loss_fn, divisor = objective(model, batches[update], Recipe(loss=case.loss))
        every = [batch for k in numbers if case.plan[k] != "eval" for batch in batches[k]]
        check = ComposedCheck(
            {stage.index: stage.module for stage in schedule.parts.stages},
            [(batch.inputs, batch.target) for batch in every],
            against=Composed(
                loss_fn,
                build=partial(model_for, case),
                optimizer=schedule.optimizer,
                contract=Contract(loss_divisor=divisor, max_norm=max_norm_of(case, update)),
            ),
            timeout_s=DEFAULT_TIMEOUT_S,
        )
        checks.append(check)
        with check:
            for k in numbers:
                _perform(check, steps, schedule, case, k, batches=batches[k], divisor=divisor)
        verdicts.append(check.verdict)
    return verdicts


def _perform(
    check: ComposedCheck,
    steps: Steps,
    schedule: PipelineSchedule,
    case: Case,
    operation: int,
    *,
    batches: Sequence[Batch],
    divisor: float,
) -> None:
    """Do one operation of the plan, and report what an update reports."""
    pairs = [(batch.inputs, batch.target) for batch in specimen(case.specimen).feed(batches, schedule.parts)]
    loss_divisor, name = None if case.loss == "mean" else divisor, case.plan[operation]
    if name == "accumulate":
        steps.accumulate(pairs, loss_divisor=loss_divisor)
    elif name == "eval":
        steps.eval_step(pairs, loss_divisor=loss_divisor)
    else:
        result = steps.train_step(pairs, max_norm=max_norm_of(case, operation), loss_divisor=loss_divisor)
        check.report(norm=result.grad_norm)
        if len(result.losses) == check.microbatches:  # else those of other operations count as well
            check.report(losses=result.losses, loss=result.loss)
