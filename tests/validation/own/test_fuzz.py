"""Fuzzing: what is drawn, that a campaign is its seed, and that a failure shrinks to the least that fails."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from pipeproof.commands.campaign import validate_case
from pipeproof.core.verdict import LawResult, Mismatch, Verdict
from pipeproof.own.case import FUZZED_DTYPES, MODELS, SCHEDULES, Case
from pipeproof.own.fuzz import PLANS, Tally, cases, fuzz, judge_case
from pipeproof.own.runtimes import OWN, TORCH
from pipeproof.own.validator import validate
from pipeproof.pipeline.transports import RULES, Transport
from pipeproof.wings.simulated import EVERY, Decisions, SimulatedWorld, Simulation
from pipeproof.worlds.world import World
from tests.support.golden import golden

PASS = Verdict("", "pass", "bitwise", (LawResult("loss", "pass", 1, 1),))


def campaign(
    budget: int, seed: int = 0, wrong: Callable[[Case, list[Case]], object] = lambda case, ran: False
) -> tuple[list[Case], Tally, Any]:
    """A campaign without ranks, in which cases are ``wrong``: the cases that it ran, its tally, and what it found."""
    ran, tally = list[Case](), Tally(budget)

    def run(case: Case, world: World) -> Verdict:
        ran.append(case)
        return replace(PASS, outcome="fail", config=str(case)) if wrong(case, ran) else PASS

    with World() as world:
        return ran, tally, fuzz(world, tally, seed_=seed, run=run)


@pytest.mark.long
def test_a_campaign_is_its_seed_and_its_budget() -> None:
    one, two, other = (campaign(40, seed)[0] for seed in (1, 1, 2))
    assert one == two
    assert len(one) == 40
    assert one != other


@pytest.mark.long
def test_draws_reach_everything_that_a_case_can_be() -> None:
    ran, *_ = campaign(400)
    reached = {
        "schedule": SCHEDULES,
        "ranks": range(1, 5),
        "virtual": range(1, 4),
        "microbatches": range(1, 10),
        "model": MODELS,
        "plan": PLANS,
        "ragged": (True, False),
        "unequal": (True, False),
        "loss": ("mean", "tokens"),
        "dtype": FUZZED_DTYPES,
    }
    assert {name: {getattr(case, name) for case in ran} for name in reached} == {k: {*v} for k, v in reached.items()}
    assert {size for case in ran for size in case.split} == {1, 2, 3}
    assert any(len(set(case.split)) > 1 for case in ran)
    assert any(case.microbatches < case.ranks for case in ran)


@pytest.mark.long
def test_replicas_are_drawn_for_torch_as_far_as_there_are_ranks() -> None:
    drawn: list[Case] = []

    @settings(max_examples=200, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases(runtime=TORCH))
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    assert {case.replicas for case in drawn} == {1, 2}
    assert max(case.processes for case in drawn) <= 4
    assert {case.ranks for case in drawn if case.replicas == 2} == {1, 2}
    assert not [case for case in drawn if case.replicas == 2 and case.model == "batchnorm"]


def test_a_failure_shrinks_to_the_least_that_fails() -> None:
    _, tally, found = campaign(200, 0, lambda case, ran: case.microbatches >= 3 and case.ranks >= 2)
    assert found.case == Case("naive", 2, 1, 3, (1, 1), model="mlp", plan=("train",))
    assert (found.verdict.outcome, found.repeated) == ("fail", True)
    assert tally.counts["verdicts"]["fail"] > 0


def test_a_failure_that_shows_once_is_kept_and_said_not_to_repeat() -> None:
    ran, tally, found = campaign(20, 0, lambda case, ran: len(ran) == 3)
    assert (found.case, found.verdict.config, found.repeated) == (ran[2], str(ran[2]), False)
    assert tally.counts["verdicts"]["fail"] == 1


def test_a_failure_that_repeats_is_preferred_to_a_smaller_one_that_does_not() -> None:
    def wrong(case: Case, ran: list[Case]) -> bool:
        once = case.ranks == 1 and ran.count(case) == 1 and any(other.ranks > 2 for other in ran)
        return case.ranks > 2 or once

    _, _, found = campaign(50, 0, wrong)
    assert found.repeated
    assert found.case.ranks > 2


@pytest.mark.parametrize(
    ("mismatches", "undecided"), [((), 0), ((Mismatch("gradient", 1, error=3e-3, limit=6e-2),), 5)]
)
def test_unknown_is_no_pass_unless_rounding_is_too_coarse(mismatches: tuple[Mismatch, ...], undecided: int) -> None:
    unknown, tally = replace(PASS, outcome="unknown", mismatches=mismatches), Tally(5)
    with World() as world:
        found = fuzz(world, tally, run=lambda case, world: unknown)
    assert (found and found.verdict.outcome, len(tally.undecided)) == (None if mismatches else "unknown", undecided)


def test_a_tally_counts_and_reads_well() -> None:
    tally = Tally(10)
    tally.counts["verdicts"].update({"pass": 3, "fail": 1})
    tally.counts["tiers"].update({"bitwise": 3, "none": 1})
    golden(str(tally))


def test_real_ranks_agree_on_a_short_campaign(world: World) -> None:
    assert fuzz(world, tally := Tally(15), seed_=11) is None
    assert tally.counts["tiers"] == {"bitwise": 15}


def test_a_planted_fault_is_found_and_shrunk_to_its_smallest_case(world: World) -> None:
    planted = cases(schedules=("1f1b", "gpipe"), models=("mlp",), max_ranks=2).map(
        lambda case: replace(case, specimen="microbatch-dropped", plan=("train",))
    )
    found = fuzz(world, Tally(20), seed_=0, strategy=planted)
    smallest = found.case
    assert (smallest.ranks, smallest.microbatches, set(smallest.split)) == (1, 1, {1})
    assert found.verdict.law("presence").outcome == "fail"  # with one microbatch, dropping it leaves nothing
    assert validate(Case.parse(str(smallest)), world).outcome == "fail"


def test_what_decides_a_case_shrinks_with_it() -> None:
    rooms = set[int]()

    def run(case: Case, world: World) -> Verdict:
        assert isinstance(world.seed, int)
        wrong = case.microbatches > 2 and world.transport in (Transport.PAIR, Transport.RANK) and world.seed > 40
        assert not (world.room and RULES[world.transport].by_name)
        rooms.add(world.room)
        return replace(PASS, outcome="fail") if wrong else PASS

    tally = Tally(200)
    with SimulatedWorld() as world:
        found = fuzz(world, tally, run=run, deciding=Decisions(Simulation(), True, EVERY))
    assert found.case.microbatches == 3
    assert found.decision == Simulation(Transport.RANK, 41)
    assert sum(tally.counts["transports"].values()) == sum(tally.counts["deciders"].values()) == tally.cases
    assert len(tally.counts["transports"]) > 2
    assert len(rooms) > 1


@pytest.mark.parametrize("run", [judge_case, lambda case, world: validate_case(case, world)[0]], ids=["fuzz", "gate"])
@pytest.mark.parametrize("specimen", ["stage-negated", "message-lost"])
def test_a_line_names_what_decided_the_run_once(specimen: str, run: Any, simulated: World) -> None:
    case = Case.parse(f"naive r2 s2 m1 split=1,1 model=mlp plan=train seed=0 specimen={specimen}")
    simulated.decide(decision := Simulation(Transport.BUFFERED, 7))
    found = fuzz(simulated, Tally(1), strategy=st.just(case), run=run)
    assert found.verdict.outcome != "pass"
    assert found.verdict.replay == f"{replace(found.verdict, rerun='').replay} {decision.options}"


def test_torch_s_runtime_is_drawn_no_transport_on_which_who_posts_waits() -> None:
    deciding = Decisions(Simulation(), False, EVERY)
    of_torch = Case("1f1b", 2, 1, 2, (1, 1), runtime=TORCH)
    for case, count in ((of_torch, len(Transport) - 1), (replace(of_torch, runtime=OWN), len(Transport))):
        tally = Tally(100)
        with SimulatedWorld() as world:
            assert fuzz(world, tally, strategy=st.just(case), run=lambda *_: PASS, deciding=deciding) is None
        assert len(tally.counts["transports"]) == count


@pytest.mark.sweep
def test_a_rank_that_dies_is_a_finding(world: World) -> None:
    def run(case: Case, world: World) -> Verdict:
        world.run(die, ranks=1)
        return PASS

    tally = Tally(1)
    found = fuzz(world, tally, run=run)
    assert found.verdict.ended == "error"
    assert tally.counts["verdicts"]["hang or crash"] >= 1


def die(context: object) -> None:
    raise RuntimeError("dead")


@pytest.mark.long
def test_the_simplest_case_is_plain() -> None:
    assert find(cases(), lambda case: True, settings=settings(database=None)) == Case(
        "naive", 1, 1, 1, (1,), model="mlp", plan=("train",)
    )
