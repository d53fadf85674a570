"""The loss is a link: its targets tell which microbatch it was meant for, and so which messages crossed."""

import pytest

from pipeproof.cases.case import Case
from pipeproof.core.verdict import Verdict
from pipeproof.wings.composed.composed_case import validate_composed
from pipeproof.worlds.world import World
from tests.support.sweeps import some


def of_links(specimen: str, stages: int, simulated: World, schedule: str = "gpipe") -> Verdict:
    split = ",".join("1" for _ in range(stages))
    case = f"{schedule} r{stages} s{stages} m4 split={split} model=mlp plan=train seed=0 specimen={specimen}"
    return validate_composed(Case.parse(case), simulated)


@pytest.mark.parametrize("stages", some([2, 3, 4], left=[3]))
def test_activations_that_crossed_are_named_where_they_came(stages: int, simulated: World) -> None:
    verdict = of_links("activations-crossed", stages, simulated)
    (cause,) = verdict.cause
    assert (cause.rank, cause.stage, cause.microbatches) == (1, 1, (0, 1))


@pytest.mark.parametrize("stages", some([2, 3], left=[2]))
def test_gradients_that_crossed_are_wrong_where_they_came(stages: int, simulated: World) -> None:
    verdict = of_links("gradients-crossed", stages, simulated)
    assert {(one.stage, one.rank) for one in verdict.mismatches} == {(0, 0)}


@pytest.mark.parametrize("stages", some([2, 3], left=[2]))
def test_targets_that_are_others_are_not_messages_that_crossed(stages: int, simulated: World) -> None:
    verdict = of_links("microbatches-swapped", stages, simulated)
    assert [(cause.kind, cause.stage) for cause in verdict.cause] == [("swapped-data", stages - 1)]


@pytest.mark.parametrize("stages", some([2, 3], left=[2]))
def test_what_one_stage_takes_for_another_in_its_backward_alone_is_told_there(stages: int, simulated: World) -> None:
    """What flows back goes astray, and the targets do not agree with it."""
    verdict = of_links("backward-of-another", stages, simulated)
    assert "mispaired" in {cause.kind for cause in verdict.cause}, str(verdict)
    assert {one.stage for one in verdict.mismatches if one.law == "boundaries"} == {0}
