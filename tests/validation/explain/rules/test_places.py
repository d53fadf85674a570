"""A checked job of two stages, each on two replicas: what is wrong on some ranks alone is told of these."""

from dataclasses import replace

import pytest
from torch import nn

from pipeproof import World
from pipeproof.core.cause import Cause
from pipeproof.core.replicas import Replicas
from pipeproof.core.verdict import Verdict
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.members import Members
from pipeproof.explain.rules.places import place_cause
from pipeproof.whitebox.matching import Local
from pipeproof.whitebox.rank import ModulePart
from pipeproof.whitebox.stages_in_order import PlacedStage
from tests.support.golden import golden
from tests.support.steps import backward, pairs
from tests.support.sweeps import some
from tests.support.two_stages import COUNT, Job, apart, begun, times


def own(rank: int, stage: nn.Module) -> None:
    """Rank 3 has its own microbatches' mean, in which the others have half a part."""
    whole = apart()
    backward(whole, pairs(COUNT)[1::2])
    for name, parameter in stage.named_parameters() if rank == 3 else ():
        parameter.grad = whole.get_parameter(name).grad


# The job, and each cause's kind, place and factor.
JOBS: dict[str, tuple[Job, list[tuple[str, str, float | None]]]] = {
    "right": (Job(tied=False), []),
    "a norm of one rank alone": (Job(tied=False, alone=1), [("norm", "rank 1", None)]),  # and at no other stage
    "twice": (Job(tied=False, after=times({0: 2.0})), [("scale", "rank 0, stage 0", 2.0)]),
    "sign": (Job(tied=False, after=times({3: -1.0})), [("sign", "rank 3, stage 1", -1.0)]),
    "both stages": (
        Job(tied=False, after=times({1: 3.0, 3: 3.0})),
        [("scale", "rank 1, stage 0", 3.0), ("scale", "rank 3, stage 1", 3.0)],
    ),
    "zero": (Job(tied=False, after=times({3: 0.0}, "copy")), [("zero", "rank 3, stage 1, parameter copy", None)]),
    "not reduced": (Job(tied=False, after=own), [("not-reduced", "rank 3, stage 1", None)]),
    # What was there before is told of the ranks that had it.
    "left on one": (Job(tied=False, before=begun(2)), [("stale-gradient", "rank 2, stage 1", 0.5)]),
    "left on all of a stage": (Job(tied=False, before=begun(2, 3)), [("stale-gradient", "stage 1", 1.0)]),
    "left on one replica": (Job(tied=False, before=begun(1, 3)), [("stale-gradient", "ranks 1, 3", 0.5)]),
}


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("title", some(JOBS, ["right", "not reduced"]))
def test_what_is_wrong_on_some_ranks_is_told_of_these(title: str, world: World) -> None:
    job, expected = JOBS[title]
    verdict = job.verdict(world)
    assert [(cause.kind, cause.place, cause.factor) for cause in verdict.causes] == expected, str(verdict)
    assert (verdict.outcome == "pass") == (not expected)
    assert verdict.law("replicas").checked == 4
    if details := [cause.detail for cause in verdict.causes if cause.detail]:
        golden("\n".join(details), numbers=False)


@pytest.mark.parametrize(
    ("shares", "microbatches", "rank"),
    [(((0, 1), (2, 3)), (2,), 1), (((0, 1), (2, 3)), (1, 2), None), (((), ()), (2,), None)],
    ids=["its own rank", "of both", "nobody says"],
)
def test_in_a_job_the_rank_is_told_that_ran_it(
    shares: tuple[tuple[int, ...], ...], microbatches: tuple[int, ...], rank: int | None
) -> None:
    part = ModulePart((Local("weight"),), (None,))
    stage = PlacedStage(0, 0, replace(part, members=((0, part), (1, part))), {0: "weight"}, {})
    members = Members([stage], Replicas((0, 1), 4, shares=shares), tuple, (None, None))
    verdict = Verdict("a step", "fail", "none", ())
    evidence = Evidence(verdict, (0,), 4, 2, gradients={}, norms=(None, None), members=members)
    assert place_cause(Cause("dropped", rank=0, stage=0, microbatches=microbatches), evidence).rank == rank
