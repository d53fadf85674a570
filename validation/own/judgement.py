"""Judge a case, and prepare its diagnosis: reference, data, stages."""

from pipeproof.core.judge import LAWS, judge_observed
from pipeproof.core.observe.observed import Observed
from pipeproof.core.oracle import LiveOracle, Requirements
from pipeproof.core.verdict import Verdict
from pipeproof.explain.explain import diagnose as diagnose_run
from pipeproof.explain.played import Setup
from pipeproof.own.case import Case
from pipeproof.own.data import data_for, max_norm_of, model_for
from pipeproof.own.stages import layers_of, owners
from pipeproof.reference.copies import copies_apart
from pipeproof.reference.model import DTYPES
from pipeproof.reference.step import Recipe, Reference
from pipeproof.worlds.accelerator import deterministic, first_of


def judge(case: Case, observed: Observed, *, measure: bool = False) -> Verdict:
    """Judge a case's results. ``measure``: measure floors for the report even where all bits agree."""
    deterministic(case.device)
    device = first_of(case.device)
    model = model_for(case).to(device)
    owner = owners(model, case.split)
    oracle = LiveOracle(
        Reference(model, owner=owner, recipe=Recipe(loss=case.loss, late=case.late)),
        plan=case.plan,
        batches=lambda number: [batch.to(device) for batch in data_for(case, number)],
        max_norm=lambda number: max_norm_of(case, number),
    )
    laws = (*LAWS, "replicas") if case.replicas > 1 else LAWS
    requirements = Requirements(
        config=str(case),
        laws=laws,
        plan=case.plan,
        counts=(case.microbatches * case.replicas,) * len(case.plan),
        expected=frozenset((stage, name) for name, stage in owner.items()),
        oracle=oracle,
        tied=copies_apart(model, owner),
        bindings=case.bindings,
    )
    return judge_observed(requirements, observed, measure=measure)


def diagnose(case: Case, observed: Observed, verdict: Verdict) -> Verdict:
    """Add causes, likeliest first; none if evidence decides nothing."""
    return diagnose_run(setup_of(case), observed, verdict)


def setup_of(case: Case) -> Setup:
    """Return a case's setup for diagnosis."""
    return Setup(
        case.plan,
        layers=tuple(layers_of(case.split)),
        owner=owners(model_for(case), case.split),
        placement=case.built.placement,
        ranks=case.ranks,
        microbatches=case.microbatches,
        dtype=DTYPES[case.dtype],
        recipe=Recipe(loss=case.loss),
        build=lambda: model_for(case),
        batches=lambda number: data_for(case, number),
        max_norm=lambda number: max_norm_of(case, number),
    )
