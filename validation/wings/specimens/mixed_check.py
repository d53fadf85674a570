"""Steps in mixed precision, held against themselves link by link: those that are right, and planted faults."""

from dataclasses import replace
from time import perf_counter

import torch

from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.extensions import extension
from pipeproof.own.faults import SpecimenError
from pipeproof.pipeline.waiting import DEFAULT_TIMEOUT_S
from pipeproof.records.step_check import check_step
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.wings.specimens.mixed import RANKS, MixedCase, MixedFault
from pipeproof.wings.specimens.mixed_step import MixedPrecision, MixedStep, loss_fn, microbatches_of
from pipeproof.wings.specimens.trial import Trial, compare_names
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World


def validate_mixed(case: MixedCase, world: World) -> Verdict:
    """The verdict on the step, run on two of ``world``'s ranks. Raises what a run raises."""
    began = perf_counter()
    verdict: Verdict = world.run(_check_rank, case, ranks=RANKS)[0]
    return replace(verdict, rerun=f"pipeproof mutate --only {case.name}", seconds=perf_counter() - began)


def try_mixed(fault: MixedFault, world: World) -> Trial:
    """Run a step with a fault."""
    return run_mixed(fault, validate_mixed(fault, world))


def run_mixed(fault: MixedFault, verdict: Verdict) -> Trial:
    """Try a fault: is it caught, correctly named, and located? One on all ranks is to be reported on all."""
    laws = tuple(law.name for law in verdict.laws if law.outcome == "fail")
    ranks = [cause.rank for cause in verdict.causes]
    everywhere = ranks[:1] == [None] or {*ranks} == set(range(RANKS)) if fault.fault.rank is None else len(ranks) == 1
    named = compare_names(fault.cause, verdict)
    named = replace(named, located=named.located and everywhere, seconds=verdict.seconds)
    return Trial(fault.name, fault.smallest, fault.fault.law, fault.fault.kind, laws, named, None, verdict.seconds)


def _check_rank(context: RankContext, case: MixedCase) -> Verdict:
    """Check one rank's part; a job for ``World.run``."""
    step = case.step(case.way, context.rank, context.ranks)
    microbatches = microbatches_of(case.way)
    check = check_step(
        step.stage, microbatches, against=against(case.way, step), rename="{}.{}".format, timeout_s=DEFAULT_TIMEOUT_S
    )
    with check:
        step.run(microbatches, check.gradients)
        check.report(losses=step.losses if step.rank == step.last else None, norm=step.norm)
    return check.verdict


def against(way: MixedPrecision, step: MixedStep) -> StepExpectation:
    """Return the expectation for a step, with each convention of its ``way``. Raises ``SpecimenError``."""
    composed = extension("expectations", "composed")
    if composed is None:
        raise SpecimenError(
            "a step by hand is held against itself, link by link, and the wing that does it is not here"
        )
    found: StepExpectation = composed(
        loss_fn,
        optimizer=step.optimizer,
        masters={step.named[name]: master for name, master in step.masters.items()} or None,
        scaler=step.scaler if way.scale else None,
        contract=Contract(accumulation=Accumulation(torch.float32) if way.main_grad else PLAIN, max_norm=way.max_norm),
    )
    return found
