"""Records of cases: the reference's alone, and those of runs on ranks held against it."""

import json
from dataclasses import replace

import pytest

from pipeproof.own.case import Case
from pipeproof.own.observe import observe
from pipeproof.records.case_record import backwards_of, config_of, record_expected, record_observed
from pipeproof.records.compare import compare
from pipeproof.worlds.world import World

PLAN = "plan=train+accumulate+train"
CASE = Case.parse(f"1f1b r2 s2 m3 split=1,1 model=gpt-tied {PLAN} unequal seed=3")


def test_gradients_are_added_in_the_schedules_order() -> None:
    assert backwards_of(CASE) == {0: [0, 1, 2], 1: [0, 1, 2]}
    gpipe, zb_h1 = (backwards_of(replace(CASE, schedule=name)) for name in ("gpipe", "zb-h1"))
    assert gpipe == {0: [2, 1, 0], 1: [2, 1, 0]}
    assert zb_h1[0] == [0, 1, 2]


def test_a_config_says_what_the_line_says_and_what_numbers_depend_on() -> None:
    config = config_of(CASE)
    assert config["case"] == str(CASE)
    assert (config["split"], config["plan"], config["seed"]) == ([1, 1], ["train", "accumulate", "train"], 3)
    assert config["dtype"] == "fp32"
    assert "torch" in config
    assert Case.of_config(config) == CASE
    assert json.loads(json.dumps(config)) == config


def test_what_is_expected_has_every_number_and_its_floor() -> None:
    first, middle, last = record_expected(CASE).operations
    assert [len(one.losses) for one in (first, middle, last)] == [3, 3, 3]
    assert (middle.gradients, middle.norm, middle.floors) == ({}, None, None)
    assert first.gradients.keys() == first.before.keys() == first.parameters.keys()
    assert first.floors.gradients.keys() == first.gradients.keys()
    assert max(floor.largest for floor in first.floors.gradients.values()) > 0
    assert first.microbatches != last.microbatches
    assert all(last.before[name].equal(first.parameters[name]) for name in first.parameters)


def test_runs_of_any_schedule_agree_with_what_is_expected_of_one(world: World) -> None:
    expected = record_expected(CASE)
    assert expected.places["head.logits.weight"] == ((1, 1),)
    for text, tier in ((str(CASE), "bitwise"), (f"zb-v r1 s2 m3 split=1,1 model=gpt-tied {PLAN} unequal seed=3", None)):
        case = Case.parse(text)
        verdict = compare(expected, record_observed(case, observe(case, world)))
        assert verdict.outcome == "pass", str(verdict)
        assert tier is None or verdict.tier == tier
        assert verdict.law("gradient").checked == 2 * len(expected.places)


@pytest.mark.sweep
def test_a_planted_fault_is_found_in_the_record_of_its_run(world: World) -> None:
    case = Case.parse(f"{CASE} specimen=layernorm-zero")
    verdict = compare(record_expected(CASE), record_observed(case, observe(case, world)))
    assert verdict.outcome == "fail"
    assert {law.name for law in verdict.laws if law.outcome == "fail"} >= {"gradient", "grad-norm"}
    assert (found := verdict.mismatches[0]).rank == found.stage == 1
    assert found.parameter == "blocks.1.norm_1.weight"


def test_of_an_unknown_kind_of_case_there_is_no_record() -> None:
    with pytest.raises(ValueError, match="unknown model"):
        record_expected(Case.parse("1f1b r1 s1 m1 model=lstm"))
