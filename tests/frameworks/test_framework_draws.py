"""What is drawn of frameworks, without any of them."""

import pytest
from hypothesis import find, settings

from pipeproof.core.verdict import LawResult, Verdict
from pipeproof.own.case import CaseError
from pipeproof.own.fuzz import Tally, fuzz
from pipeproof.worlds.world import World
from tests.frameworks.engines import framework_draws
from tests.frameworks.engines.framework_case import FRAMEWORKS, LAYOUTS, FrameworkCase
from tests.frameworks.engines.framework_draws import framework_cases
from tests.frameworks.engines.framework_findings import FRAMEWORK_FINDINGS, known
from tests.support.sweeps import sampled, some

SIMPLEST = {
    "megatron": "megatron r1 v1 m1 dp1 layers=1 seed=0",
    "deepspeed": "deepspeed r1 v1 m1 dp1 layers=1 seed=0",
    "torchtitan": "torchtitan r2 v1 m1 dp1 layers=1 schedule=GPipe seed=0",
}
SETTINGS = settings(database=None, max_examples=50, derandomize=True, deadline=None)
PASS = Verdict("", "pass", "bitwise", (LawResult("loss", "pass", 1, 1),))


def drawn(framework: str, budget: int, seed: int, *, max_ranks: int = 4) -> list[FrameworkCase]:
    """The cases of a campaign that runs none."""
    ran: list[FrameworkCase] = []

    def run(case: FrameworkCase, world: World) -> Verdict:
        ran.append(case)
        return PASS

    with World() as world:
        strategy = framework_cases(framework, max_ranks=max_ranks)
        assert fuzz(world, Tally(budget), seed_=seed, strategy=strategy, run=run) is None
    return ran


@pytest.mark.long
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_campaign_is_its_seed_and_its_budget(framework: str) -> None:
    one, two, other = drawn(framework, 20, 1), drawn(framework, 20, 1), drawn(framework, 20, 2)
    assert one == two
    assert one != other


@pytest.mark.long
@pytest.mark.parametrize("framework", sampled(FRAMEWORKS, 3))
def test_draws_reach_every_option_and_keep_within_the_ranks(framework: str) -> None:
    ran = drawn(framework, 250, 0)
    layout = LAYOUTS[framework]
    assert {case.layout.vp for case in ran} == set(range(1, layout.most_virtual + 1))
    assert {case.microbatches for case in ran} == set(range(1, 10))
    assert {case.layout.pp for case in ran} == set(range(layout.least_ranks, 5))
    assert {case.layout.dp for case in ran} == {1, 2}
    assert max(case.processes for case in ran) <= 4
    for name in layout.offered:
        assert len({getattr(case.layout, name) for case in ran}) > 1, name
    assert all(case.layout.why_not(case.microbatches) == "" for case in ran)


@pytest.mark.long
@pytest.mark.parametrize("framework", some(FRAMEWORKS, left=["megatron", "torchtitan"]))
def test_the_simplest_case_is_plain(framework: str) -> None:
    assert str(find(framework_cases(framework), lambda case: True, settings=SETTINGS)) == SIMPLEST[framework]


def test_a_number_of_microbatches_that_wants_an_option_is_drawn() -> None:
    """Three on two ranks with virtual stages: Megatron wants another size of groups than its own, which is P."""
    assert 3 in framework_draws._sizes("megatron", 2, 1)[2]
    assert "wants 0, or 2 and more" in LAYOUTS["megatron"](pp=2, vp=2).why_not(3)


def test_a_failure_shrinks_to_the_least_that_fails() -> None:
    def run(case: FrameworkCase, world: World) -> Verdict:
        wrong = case.microbatches >= 3 and case.layout.pp >= 2 and getattr(case.layout, "tied", False)
        return Verdict(str(case), "fail", "none", ()) if wrong else PASS

    with World() as world:
        found = fuzz(world, Tally(200), strategy=framework_cases("deepspeed"), run=run)
    assert found is not None
    assert str(found.case) == "deepspeed r2 v1 m3 dp1 layers=1 tied seed=0"


def test_fewer_ranks_than_a_framework_has_are_refused() -> None:
    with pytest.raises(CaseError, match="max_ranks is 1: torchtitan has pipelines on 2 ranks and more"):
        framework_cases("torchtitan", max_ranks=1)
    assert {case.processes for case in drawn("megatron", 10, 0, max_ranks=1)} == {1}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_smallest_case_of_a_finding_is_one_that_it_shows_in(framework: str) -> None:
    for finding in FRAMEWORK_FINDINGS[framework]:
        case = FrameworkCase.parse(finding.line)
        assert case.framework == framework
        assert str(case) == finding.line
        assert known(case, [finding])
    assert not known(FrameworkCase.parse(SIMPLEST[framework]), FRAMEWORK_FINDINGS[framework])
