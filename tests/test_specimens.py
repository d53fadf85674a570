"""The self-test: every planted fault, on every schedule, must fail the law that it is about and name where."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from pipeline.schedules import SPLIT, virtuals
from reference.model import build_model
from validation.case import SCHEDULES, Case
from validation.specimens import SPECIMENS, SpecimenError, specimen
from validation.stages import owners
from validation.validator import validate
from validation.world import World


def case_of(schedule: str, name: str, *, microbatches: int = 8) -> Case:
    virtual = virtuals(schedule, looped=2)
    models = specimen(name).models or ("gpt",)
    split = (1,) * (4 * virtual)
    return Case(schedule, 4, virtual, microbatches, split, model=models[0], plan=("train",), specimen=name)


Place = tuple[int | None, int | None, int | None, str | None]  # rank, stage, microbatch, parameter


def parameters(case: Case, stages: Iterable[int]) -> set[Place]:
    """Every parameter of ``stages`` that is trained."""
    model = build_model(case.model, layers=case.layers, seed=0)
    trained = {name for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.requires_grad}
    return {
        parameter(case, s, name) for name, s in owners(model, case.split).items() if s in stages and name in trained
    }


def parameter(case: Case, stage: int, name: str) -> Place:
    return case.built.placement[stage], stage, None, name


def norm_of(case: Case, stage: int) -> Place:
    """The first parameter of a stage that holds one layer, its first LayerNorm's weight."""
    return parameter(case, stage, f"blocks.{stage}.norm_1.weight")


def overwritten(case: Case, stage: int) -> set[Place]:
    """What differs if this is the last stage whose input was overwritten before its backward.

    Its first LayerNorm alone reads the input again, for its weight's gradient and for what it hands on.
    """
    return {norm_of(case, stage), *parameters(case, range(stage))}


# For each specimen, the places that its law must name: exactly one of these sets.
EXPECTED: dict[str, Callable[[Case], list[set[Place]]]] = {
    "loss-undivided": lambda case: [parameters(case, range(case.stages))],
    "clip-last-stage": lambda case: [parameters(case, range(case.stages - 1))],
    "microbatch-dropped": lambda case: [parameters(case, range(case.stages))],
    "microbatches-swapped": lambda case: [{(rank, None, m, None) for rank in range(case.ranks) for m in (0, 1, None)}],
    "receive-buffer-reused": lambda case: [overwritten(case, stage) for stage in range(1, case.stages)],
    "activation-nan": lambda case: [{(1, 1, 1, None)}],
    "stage-negated": lambda case: [parameters(case, [case.stages // 2])],
    "gradient-none": lambda case: [{norm_of(case, case.stages - 1)}],
    "layernorm-zero": lambda case: [{norm_of(case, case.stages // 2)}],
    "tied-not-reduced": lambda case: [
        {parameter(case, 0, "embed.token.weight"), parameter(case, case.stages - 1, "head.logits.weight")}
    ],
    "norm-counts-tied-twice": lambda case: [{(rank, None, None, None) for rank in range(case.ranks)}],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SPECIMENS)
def test_a_planted_fault_fails_its_law_and_is_located(world: World, schedule: str, name: str) -> None:
    case = case_of(schedule, name)
    verdict = validate(case, world)
    law = specimen(name).law
    assert verdict.verdict == "fail"
    assert verdict.law(law).outcome == "fail", [str(law) for law in verdict.laws]
    named: set[Place] = {(m.rank, m.stage, m.microbatch, m.parameter) for m in verdict.mismatches if m.law == law}
    if name == "receive-buffer-reused" and schedule in SPLIT:
        # Between I and W a stage also keeps received gradients, so any stage may be hit; which, the order decides.
        assert named <= parameters(case, range(case.stages))
        assert named
    else:
        assert named in EXPECTED[name](case)
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
