"""A case of our own runtime: its steps are checked link by link, without a reference."""

from dataclasses import replace
from functools import partial
from time import perf_counter

from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case, CaseError
from pipeproof.own.data import data_for, max_norm_of, model_for
from pipeproof.own.faults import Files, files_behind, read, specimen
from pipeproof.own.observe import assemble, plant
from pipeproof.own.runtimes import OWN
from pipeproof.own.validator import refusal
from pipeproof.pipeline.waiting import DEFAULT_TIMEOUT_S
from pipeproof.records.checked_step import look_at
from pipeproof.reference.step import Recipe, objective
from pipeproof.wings.composed.check import ComposedCheck
from pipeproof.wings.composed.step import StageByStage
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World


def validate_composed(case: Case, world: World) -> Verdict:
    """Validate ``case`` on ``world``'s ranks; return the verdict on its first wrong update, else on its last.

    Evaluation and the optimizer are not compared. Raises the errors of ``validate``.
    """
    if (verdict := refusal(case)) is not None:
        return verdict
    began = perf_counter()
    rows: list[list[Verdict]] = world.run(check_rank, case, files_behind(case.specimen), ranks=case.processes)
    found = next((one for one in rows[0] if one.outcome != "pass"), rows[0][-1])
    return replace(found, config=str(case), bindings=case.bindings, rerun="", seconds=perf_counter() - began)


def check_composed(case: Case) -> None:
    """Raise ``CaseError`` for a case that this check does not cover."""
    if case.runtime != OWN:
        raise CaseError(f"--check composed with runtime {case.runtime}: expected a case of our own runtime")
    if case.replicas > 1:
        raise CaseError(f"--check composed with {case.replicas} replicas: expected a pipeline alone")


def check_rank(context: RankContext, case: Case, files: Files) -> list[Verdict]:
    """Run one rank's part of ``case`` and return a verdict on each update; a job for ``World.run``."""
    read(files)
    model, schedule = assemble(context, case)
    checks, first = list[ComposedCheck](), 0
    schedule = plant(case, schedule).wrap(partial(look_at, look=lambda: checks[-1].gradients()))
    steps = specimen(case.specimen).drive(schedule)
    for update in (k for k, name in enumerate(case.plan) if name == "train"):
        batches = {k: [one.to(context.device) for one in data_for(case, k)] for k in range(first, update + 1)}
        first, max_norm = update + 1, max_norm_of(case, update)
        loss_fn, divisor = objective(model, batches[update], Recipe(loss=case.loss))
        contract = Contract(loss_divisor=divisor, max_norm=max_norm)
        build, optimizer = partial(model_for, case), schedule.optimizer
        check = ComposedCheck(
            {stage.index: stage.module for stage in schedule.parts.stages},
            [(one.inputs, one.target) for k, own in batches.items() if case.plan[k] != "eval" for one in own],
            against=StageByStage(loss_fn, build=build, optimizer=optimizer, contract=contract),
            timeout_s=DEFAULT_TIMEOUT_S,
        )
        checks.append(check)
        with check:
            for k, own in batches.items():
                fed = specimen(case.specimen).feed(own, schedule.parts)
                pairs, by = [(one.inputs, one.target) for one in fed], None if case.loss == "mean" else divisor
                if case.plan[k] == "accumulate":
                    steps.accumulate(pairs, loss_divisor=by)
                elif case.plan[k] == "eval":
                    steps.eval_step(pairs, loss_divisor=by)
                else:
                    result = steps.train_step(pairs, max_norm=max_norm, loss_divisor=by)
                    check.report(norm=result.grad_norm)
                    if len(result.losses) == check.microbatches:  # otherwise other operations' losses are included
                        check.report(losses=result.losses, loss=result.loss)
    return [check.verdict for check in checks]
