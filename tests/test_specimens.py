"""The self-test: every planted fault, on every schedule, must fail the law that it is about and name where."""

from dataclasses import replace

import pytest

from pipeline.schedules import LOOPED
from validation.case import SCHEDULES, Case
from validation.specimens import SPECIMENS, SpecimenError, specimen
from validation.validator import validate
from validation.world import World


def case_of(schedule: str, name: str, *, microbatches: int = 4) -> Case:
    virtual = 2 if schedule in LOOPED else 1
    models = specimen(name).models or ("gpt",)
    split = (1,) * (4 * virtual)
    return Case(schedule, 4, virtual, microbatches, split, model=models[0], plan=("train",), specimen=name)


# For each specimen: the stages whose parameters may be named (from the number of stages), and the law's parameter.
EXPECTED: dict[str, tuple[str, str]] = {
    "loss-undivided": ("any", ""),
    "clip-last-stage": ("not last", ""),
    "microbatch-dropped": ("any", ""),
    "microbatches-swapped": ("none", ""),
    "receive-buffer-reused": ("any", ""),
    "activation-nan": ("1", ""),
    "stage-negated": ("middle", ""),
    "gradient-none": ("last", "norm_1.weight"),
    "layernorm-zero": ("middle", "norm_1.weight"),
    "tied-not-reduced": ("ends", "weight"),
    "norm-counts-tied-twice": ("none", ""),
}


def stages_named(where: str, stages: int) -> set[int | None]:
    return {
        "any": set(range(stages)),
        "not last": set(range(stages - 1)),
        "none": {None},
        "1": {1},
        "middle": {stages // 2},
        "last": {stages - 1},
        "ends": {0, stages - 1},
    }[where]  # type: ignore[return-value]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SPECIMENS)
def test_a_planted_fault_fails_its_law_and_is_located(world: World, schedule: str, name: str) -> None:
    case = case_of(schedule, name)
    verdict = validate(case, world)
    law = specimen(name).law
    assert verdict.verdict == "fail"
    assert verdict.law(law).outcome == "fail", [str(law) for law in verdict.laws]
    found = [mismatch for mismatch in verdict.mismatches if mismatch.law == law]
    where, parameter = EXPECTED[name]
    assert {mismatch.stage for mismatch in found} <= stages_named(where, case.stages)
    assert all(parameter in (mismatch.parameter or "") for mismatch in found)
    assert str(case) in verdict.replay


@pytest.mark.parametrize("name", SPECIMENS)
def test_the_smallest_case_shows_the_fault_and_nothing_is_wrong_without_it(world: World, name: str) -> None:
    case = Case.parse(specimen(name).smallest)
    assert validate(case, world).verdict == "pass"
    assert validate(replace(case, specimen=name), world).law(specimen(name).law).outcome == "fail"


def test_every_specimen_is_expected_somewhere_and_says_where_it_comes_from() -> None:
    assert set(EXPECTED) == set(SPECIMENS)
    for one in SPECIMENS.values():
        assert one.summary
        assert one.origin
        assert one.law


def test_what_a_step_can_hide_is_caught_by_its_own_law(world: World) -> None:
    """Loss and norm are blind to a stage's sign: the gradient law alone must fail, with the update it causes."""
    verdict = validate(case_of("1f1b", "stage-negated"), world)
    assert {law.name for law in verdict.laws if law.outcome == "fail"} == {"gradient", "updated-parameters"}


def test_nan_says_where_it_first_appeared(world: World) -> None:
    verdict = validate(case_of("interleaved", "activation-nan"), world)
    first = verdict.mismatches[0]
    assert (first.rank, first.stage, first.microbatch, first.action) == (1, 1, 1, "1F1")
    assert "the first output that is not finite is 1F1's" in first.seen


def test_an_unknown_specimen_is_refused() -> None:
    with pytest.raises(SpecimenError, match="unknown specimen 'gremlin': known are loss-undivided"):
        specimen("gremlin")
