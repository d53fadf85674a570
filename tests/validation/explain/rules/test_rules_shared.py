"""A checked job of two stages with a copy of one weight in each: what is wrong is told of all that may have done it."""

import pytest
import torch.distributed as dist
from torch import nn

from pipeproof import SimulatedWorld, SingleDevice, World, check_step
from pipeproof.core.verdict import Verdict
from pipeproof.worlds.worker import RankContext
from tests.support.golden import golden
from tests.support.steps import backward, loss_fn, pairs
from tests.support.sweeps import some
from tests.support.two_stages import COUNT, TIED, Apart, Job, begun, build, times

WEIGHT = f"parameter {TIED}"
BOTH = f"stages 0, 1, {WEIGHT}"


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("reduced", [("stage", "tied"), ("tied", "stage")])
def test_a_right_job_has_nothing_wrong(reduced: tuple[str, ...], world: World) -> None:
    verdict = Job(reduced=reduced).verdict(world)
    assert verdict.outcome == "pass", str(verdict)


# The job, each cause's kind, place and factor, and whether it is left to a sweep.
JOBS: dict[str, tuple[Job, list[tuple[str, str, float | None]], bool]] = {
    # The axis along which copies are apart tells which sum is missing.
    "not over replicas": (Job(reduced=("tied",)), [("not-reduced", BOTH, None)], False),
    "not over stages": (Job(reduced=("stage",)), [("tied-not-summed", WEIGHT, None)], False),
    "neither": (Job(reduced=()), [("tied-not-summed", WEIGHT, None), ("not-reduced", BOTH, None)], False),
    **{  # what was there before is told of the stages, or ranks, that had it
        f"left on {ranks}, {record}": (
            Job(1, before=begun(*ranks, only=TIED), record=record),
            [("stale-gradient", place, factor)],
            True,
        )
        for ranks, place, factor in (
            ((0,), "rank 0, stage 0", 1.0),
            ((1,), f"rank 1, stage 1, {WEIGHT}", 1.0),
            ((0, 1), BOTH, 2.0),
        )
        for record in (False, True)
    },
    **{
        f"left on {ranks} of replicas": (Job(before=begun(*ranks, only=TIED)), [("stale-gradient", place, 0.5)], True)
        for ranks, place in (
            ((2,), f"rank 2, stage 1, {WEIGHT}"),
            ((1, 2), f"ranks 1, 2, {BOTH}"),
            ((2, 3), f"stage 1, {WEIGHT}"),
        )
    },
    **{  # a factor of every copy is no one stage's
        f"{words}, {record}": (Job(replicas, reduced=reduced, record=record), [("scale", BOTH, 2.0)], False)
        for words, replicas, reduced in (("twice", 1, ("tied", "tied")), ("over all", 2, ("stage", "all")))
        for record in (False, True)
    },
    "one copy": (Job(1, after=times({0: 3.0}, TIED)), [("scale", "rank 0, stage 0", 3.0)], True),
}


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("title", some(JOBS, [title for title, (*_, swept) in JOBS.items() if swept]))
def test_a_tied_weight_is_told_of_all_that_may_have_done_it(title: str, world: World) -> None:
    job, expected, _ = JOBS[title]
    verdict = job.verdict(world)
    assert [(cause.kind, cause.place, cause.factor) for cause in verdict.causes] == expected, str(verdict)
    if details := [cause.detail for cause in verdict.causes if cause.detail]:
        golden("\n".join(details), numbers=False)


def in_bf16() -> nn.Module:
    return build(Apart).bfloat16()


def replicated(context: RankContext, reduced: bool, noisy: bool) -> Verdict:
    """Two replicas of a model in bf16, with two microbatches each."""
    data = [(x.bfloat16(), target.bfloat16()) for x, target in pairs(COUNT)[context.rank :: 2]]
    model = in_bf16()
    with check_step({0: model}, data, against=SingleDevice(in_bf16, loss_fn)) as check:
        backward(model, data)
        for one in (p.grad for p in model.parameters() if p.grad is not None):
            if reduced:
                dist.all_reduce(one)
                one /= 2
            if noisy and context.rank:
                one *= 1 + 2**-7
        check.gradients()
    return check.verdict


@pytest.mark.parametrize(
    ("reduced", "noisy", "kinds"), [(False, False, {"not-reduced"}), (True, False, set()), (True, True, set())]
)
def test_gradients_in_bf16_that_no_rank_reduced_are_told_from_others(
    reduced: bool, noisy: bool, kinds: set[str]
) -> None:
    with SimulatedWorld(silent=True) as world:
        verdict = world.run(replicated, reduced, noisy, ranks=2)[0]
    assert {one.kind for one in verdict.causes} == kinds, str(verdict)
    assert verdict.law("replicas").outcome == ("pass" if reduced and not noisy else "fail")
