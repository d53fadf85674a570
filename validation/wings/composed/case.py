"""A case of our own runtime, whose steps are held against themselves, link by link, in place of a reference."""

from dataclasses import replace
from functools import partial
from time import perf_counter

from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case, CaseError
from pipeproof.own.data import data_for, max_norm_of, model_for
from pipeproof.own.faults import Files, files_behind, read, specimen
from pipeproof.own.observe import assemble, planted
from pipeproof.own.runtimes import OWN
from pipeproof.own.validator import refusal
from pipeproof.pipeline.waiting import DEFAULT_TIMEOUT_S
from pipeproof.records.checked_step import looked_at
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
    rows: list[list[Verdict]] = world.run(checked_rank, case, files_behind(case.specimen), ranks=case.processes)
    found = next((one for one in rows[0] if one.verdict != "pass"), rows[0][-1])
    return replace(found, config=str(case), bindings=case.bindings, rerun="", seconds=perf_counter() - began)


def check_composed(case: Case) -> None:
    """Raise ``CaseError`` for a case that cannot be held against itself."""
    if case.runtime != OWN:
        raise CaseError(f"--check composed with runtime {case.runtime}: expected a case of our own runtime")
    if case.replicas > 1:
        raise CaseError(f"--check composed with {case.replicas} replicas: expected a pipeline alone")


def checked_rank(context: RankContext, case: Case, files: Files) -> list[Verdict]:
    """One rank's part of ``case``; a job for ``World.run``: a verdict on each update."""
    read(files)
    model, schedule = assemble(context, case)
    checks, first = list[ComposedCheck](), 0
    schedule = planted(case, schedule).wrapped(partial(looked_at, look=lambda: checks[-1].gradients()))
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
            against=Composed(loss_fn, build=build, optimizer=optimizer, contract=contract),
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
                    if len(result.losses) == check.microbatches:  # else those of other operations count as well
                        check.report(losses=result.losses, loss=result.loss)
    return [check.verdict for check in checks]
