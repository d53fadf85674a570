"""What is true of a case with a specimen of the catalogue, beside what the specimen itself says."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from truth_check import Counts, Truth

from pipeproof.core.verdict import Verdict
from pipeproof.own.case import Case
from pipeproof.own.faults import pass_on
from pipeproof.own.judgement import diagnose, judge
from pipeproof.own.observe import observe
from pipeproof.own.validator import crash_verdict, explain_case, refusal_verdict
from pipeproof.pipeline.program import lower
from pipeproof.pipeline.program_laws import violations
from pipeproof.wings.specimens import SPECIMENS
from pipeproof.wings.specimens.choice import tries_on
from pipeproof.wings.specimens.specimen import Specimen, split_microbatches
from pipeproof.wings.specimens.trial import smallest_of
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.world import World

# Which things are wrong in a run that has one of these specimens planted.
WRONG: Mapping[str, frozenset[str]] = {
    name: frozenset(things.split())
    for things, names in {
        # The scale of losses and gradients.
        "boundary gradients scale": "loss-undivided loss-divided-twice mean-of-means padding-counted count-off-by-one "
        "divided-on-every-stage boundary-hook-stays",
        "sums gradients scale": "sum-rescaled weight-half-undivided microbatch-negated",
        "reduction gradients scale": "replicas-summed layernorm-doubled stage-negated",
        # Sums of microbatches.
        "sums gradients dropped": "microbatch-dropped last-microbatch-dropped only-last-microbatch weight-half-dropped "
        "first-stage-weights-empty weights-never-drained",
        "sums gradients doubled": "microbatch-doubled weight-half-twice weight-halves-after-whole",
        "sums gradients dropped doubled": "weight-half-of-another",
        "sums gradients": "shared-weight-doubled",
        "gradients dropped": "accumulated-lost",
        "gradients stale": "gradients-not-cleared",
        "gradients": "auxiliary-loss gradients-onto-parameters evaluation-differentiates outputs-summed "
        "recomputed-with-fresh-mask",
        "gradients swapped": "backward-of-another",
        # Data and messages.
        "boundary loss gradients swapped": "microbatches-swapped targets-shifted activation-repeated "
        "activations-crossed",
        "boundary loss gradients": "side-input-of-first microbatches-cut cut-along-tokens activation-of-other-stage "
        "activation-read-early activation-partly-old activations-rounded activation-damaged activation-nan "
        "layers-counted-from-zero dropout-other-seed side-input-missing mask-missing other-epsilon stage-in-bf16 "
        "layers-in-other-order layer-repeated",
        "boundary loss gradients stale": "activation-of-step-before",
        "loss gradients": "targets-of-step-before",
        "weights boundary loss gradients": "weights-of-other-seed",
        "partition loss gradients": "layer-skipped",
        "boundary gradients swapped": "gradient-repeated gradients-crossed",
        "boundary gradients": "gradients-travel-rounded",
        "boundary memory gradients": "receive-buffer-reused input-let-go input-poisoned input-partly-overwritten",
        # Between the last backward and the norm.
        "reduction gradients": "gradients-all-zero gradient-none layernorm-zero gradient-rolled gradients-rounded "
        "frozen-gets-gradient "
        "averaged-over-wrong-group tied-not-reduced tied-reduced-twice tied-last-left-out tied-share-lost "
        "tied-shares-misaligned",
        "sums reduction gradients": "tied-reduced-early",
        # After the gradients.
        "norm": "norm-counts-tied-twice norm-without-stage norm-rounded norm-after-clipping",
        "norm clip": "norm-of-rank",
        "clip": "clip-last-stage clip-never clip-by-stage clip-twice",
        "update": "updated-before-reduced tied-copy-other-rate update-skipped-on-stage updated-twice",
        "report": "loss-of-other-ranks loss-sent-as-half loss-divided-in-place loss-of-last-microbatch loss-summed "
        "losses-in-other-order evaluation-divided-again nothing-reported",
        "mode": "evaluation-mode-stays evaluation-in-training-mode",
        "buffers": "evaluation-moves-statistics statistics-counted-twice",
        # What no rank can run.
        "order": "message-lost backward-before-forward weight-half-first warm-up-beyond backward-missing "
        "backward-repeated stage-on-other-rank microbatches-counted-otherwise sends-last send-before-made "
        "receive-after-use receive-missing sends-crossed",
    }.items()
    for name in names.split()
}


def truth_of(specimen: Specimen, case: Case) -> Truth:
    """What is true of ``case``, which has ``specimen`` planted."""
    planted = specimen.cause(case)
    found = Truth(
        kinds=(planted.kind,),
        wrong=WRONG[specimen.name],
        ranks=() if planted.rank is None else (planted.rank,),
        stages=() if planted.stage is None else (planted.stage,),
        microbatches=planted.microbatches,
        parameter="" if planted.parameter is None else f"^{planted.parameter}$",
        alike=specimen.fault.alike,
        factors=() if planted.factor is None else (planted.factor,),
    )
    return _MORE.get(specimen.name, lambda truth, case: truth)(found, case)


def _popped_otherwise(truth: Truth, case: Case) -> Truth:
    """One microbatch twice in the place of another."""
    twice = split_microbatches(case.built, case.stages // 2)[1:2]
    return replace(truth, also=(replace(truth, kinds=("doubled",), microbatches=twice, alike=(), factors=(2.0,)),))


def _of_two_stages(truth: Truth, case: Case) -> Truth:
    """The first two stages have the mean of both gradients."""
    placement = case.built.placement
    return replace(truth, stages=(0, 1), ranks=(placement[0], placement[1]), parameter=r"norm.*\.weight$")


# Specimens of which more is true than one cause can say.
_MORE: Mapping[str, Callable[[Truth, Case], Truth]] = {
    "weight-half-of-another": _popped_otherwise,
    "averaged-over-wrong-group": _of_two_stages,
}


def counts_of(case: Case) -> Counts:
    """How many there are of each in ``case``."""
    return Counts(case.ranks, case.stages, case.microbatches, case.replicas)


def wanted(names: Sequence[str], schedules: Sequence[str]) -> Iterator[Case]:
    """Cases of specimens: on ``schedules``, or each in its smallest where there is none."""
    if schedules:
        yield from (case for case, _ in tries_on(names or list(SPECIMENS), schedules)[0])
    else:
        yield from (smallest_of(SPECIMENS[name]) for name in names or SPECIMENS)


def tried(case: Case, world: World) -> Iterator[Verdict]:
    """What is said of ``case`` with boundary tensors, and then from final gradients alone."""
    specimen = SPECIMENS[case.specimen]
    if specimen.reorder is not pass_on:
        if broken := tuple(violations(specimen.reorder(lower(case.built)))):
            yield refusal_verdict(case, broken)
        return
    try:
        observed = observe(case, world)
    except RankFailed as failure:
        yield crash_verdict(case, failure)
        return
    verdict = judge(case, observed)
    if verdict.outcome != "fail":
        yield verdict
        return
    yield explain_case(case, world, observed, verdict)
    yield diagnose(case, observed.final(), verdict)
