"""Two records against each other. Every law is shown failing."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeproof.own.case import Case
from pipeproof.records.case_record import record_expected
from pipeproof.records.compare import compare
from pipeproof.records.record import Record, RecordedOperation, RecordError
from tests.support.golden import golden
from tests.support.sweeps import each_once, some

EXPECTED = record_expected(Case.parse("1f1b r2 s2 m3 split=1,1 model=batchnorm plan=train+train seed=3"))
REVERSED = record_expected(Case.parse("gpipe r1 s1 m3 split=2 model=batchnorm plan=train+train seed=3"))
WEIGHT = "blocks.1.linear.weight"


def changed(record: Record, number: int = 0, **fields: Any) -> Record:
    """``record`` with some fields of one operation replaced, as what a run gave."""
    operations = list(record.operations)
    operations[number] = replace(operations[number], **fields)
    return replace(record, kind="observed", operations=tuple(operations))


def with_one(kind: str, change: Callable[[Any], object], name: str = WEIGHT) -> Callable[[RecordedOperation], Any]:
    """The fields that an operation gets where one tensor of a kind is changed; to None where that is gone."""

    def fields(one: RecordedOperation) -> Mapping[str, object]:
        tensors: dict[str, object] = dict(getattr(one, kind))
        tensors[name] = change(tensors[name])
        return {kind: tensors}

    return fields


def test_the_same_record_agrees_bit_for_bit() -> None:
    verdict = compare(EXPECTED, EXPECTED, rerun="pipeproof compare a b")
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise")
    assert verdict.replay.split() == ["pipeproof", "compare", "a", "b"]
    assert verdict.law("buffers").checked > 0


def test_another_order_of_addition_agrees_within_rounding() -> None:
    verdict = compare(EXPECTED, REVERSED)
    assert (verdict.outcome, verdict.tier) == ("pass", "fp32"), str(verdict)
    assert 0 < verdict.law("gradient").worst < 1e-6
    assert verdict.law("gradient").floor > 0


@pytest.mark.parametrize("floors", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_the_tier_is_that_of_the_numbers_compared(dtype: str, floors: bool) -> None:
    text = f"r2 s2 m4 split=1,1 model=mlp dtype={dtype} plan=train seed=1"
    one, other = (record_expected(Case.parse(f"{schedule} {text}")) for schedule in ("1f1b", "gpipe"))
    one = one if floors else changed(one, floors=None)
    verdict = compare(one, other)
    assert (verdict.outcome, verdict.tier) == ("pass", dtype), str(verdict)


@pytest.mark.long
@pytest.mark.parametrize("model", some(["gpt-tied", "twice", "pair", "frozen"], left=["pair", "frozen"]))
def test_schedules_that_add_in_another_order_agree_over_several_steps(model: str) -> None:
    text = f"r2 s2 m4 split=1,1 model={model} plan=train+train+train seed=1"
    one, other = (record_expected(Case.parse(f"{schedule} {text}")) for schedule in ("1f1b", "gpipe"))
    assert compare(one, other).outcome == "pass", str(compare(one, other))
    bare = replace(one, operations=tuple(replace(each, floors=None) for each in one.operations))
    assert compare(bare, other).outcome == "pass", str(compare(bare, other))


def test_without_floors_rounding_still_is_no_fault() -> None:
    bare = replace(EXPECTED, operations=tuple(replace(one, floors=None) for one in EXPECTED.operations))
    assert compare(bare, REVERSED).outcome == "pass"
    small = changed(bare, **with_one("gradients", lambda g: g * (1 + 2e-5))(bare.operations[0]))
    assert compare(bare, small).outcome == "unknown"


FAULTS: Mapping[str, tuple[Callable[[RecordedOperation], Any], str]] = {
    "loss": (lambda one: {"losses": (one.losses[0], one.losses[1] * 1.1, one.losses[2])}, "microbatch 1"),
    "whole loss": (lambda one: {"loss": one.loss * 3}, "every rank"),
    "fewer losses": (lambda one: {"losses": one.losses[:2]}, "every rank"),
    "presence": (with_one("gradients", lambda _: None), f"rank 1, stage 1, parameter {WEIGHT}"),
    "gradient": (with_one("gradients", lambda g: -g), f"rank 1, stage 1, parameter {WEIGHT}"),
    "zero gradient": (with_one("gradients", lambda g: g * 0), f"rank 1, stage 1, parameter {WEIGHT}"),
    "grad-norm": (lambda one: {"norm": one.norm * 1.01}, "every rank"),
    "no grad-norm": (lambda one: {"norm": None}, "every rank"),
    "updated-parameters": (with_one("parameters", lambda p: p + 0.1), f"rank 1, stage 1, parameter {WEIGHT}"),
    "buffers": (
        with_one("buffers", lambda b: b + 1e-3, "blocks.0.norm.running_mean"),
        "parameter blocks.0.norm.running_mean",
    ),
}


@pytest.mark.parametrize(*each_once(name=FAULTS, number=[0, 1]))
def test_every_number_that_is_wrong_is_a_failure_with_its_place(name: str, number: int) -> None:
    change, where = FAULTS[name]
    wrong = changed(EXPECTED, number, **change(EXPECTED.operations[number]))
    verdict = compare(EXPECTED, wrong)
    assert verdict.outcome == "fail"
    law = name.removeprefix("no ").removeprefix("whole ").removeprefix("fewer ").removeprefix("zero ")
    first = verdict.mismatches[0]
    assert first.law == law.replace("losses", "loss")
    assert first.where == where
    assert first.operation == number + 1


@pytest.mark.parametrize("count", [0, 2])
def test_a_parameter_held_by_none_or_by_two_is_a_failure(count: int) -> None:
    places = {**EXPECTED.places, WEIGHT: ((0, 0), (1, 1))[:count]}
    verdict = compare(EXPECTED, replace(EXPECTED, places=places))
    assert verdict.law("parameters-once").outcome == "fail"
    assert verdict.mismatches[0].observed_text == f"held {count} times"


def test_a_parameter_that_only_one_record_knows_is_a_failure() -> None:
    gradients = {**EXPECTED.operations[0].gradients, "extra": torch.ones(2)}
    places = {**EXPECTED.places, "extra": ((0, 0),)}
    verdict = compare(EXPECTED, replace(changed(EXPECTED, gradients=gradients), places=places))
    assert (verdict.mismatches[0].parameter, verdict.mismatches[0].expected_text) == ("extra", "held 0 times")


def test_what_comes_after_the_first_difference_is_consequence() -> None:
    wrong = changed(EXPECTED, 0, norm=1.0)
    wrong = changed(wrong, 1, norm=2.0)
    assert {mismatch.operation for mismatch in compare(EXPECTED, wrong).mismatches} == {1}


def test_numbers_that_are_none_are_no_pass() -> None:
    nan = changed(EXPECTED, losses=(float("nan"),) * 3)
    assert compare(EXPECTED, nan).outcome == "fail"
    assert compare(nan, EXPECTED).law("loss").outcome == "unknown"


def test_an_expected_gradient_of_zero_proves_nothing() -> None:
    zero = changed(EXPECTED, **with_one("gradients", torch.zeros_like)(EXPECTED.operations[0]))
    law = compare(zero, zero).law("gradient")
    golden(law.note)
    every = {name: torch.zeros(2) for name in EXPECTED.operations[0].gradients}
    none = replace(EXPECTED, operations=tuple(replace(one, gradients=every) for one in EXPECTED.operations))
    assert compare(none, none).law("gradient").outcome == "unknown"


LINE = "1f1b r2 s2 m3 split=1,1 model=batchnorm"
OTHER: Mapping[str, Callable[[RecordedOperation], Record]] = {
    "plan": lambda one: record_expected(Case.parse(f"{LINE} plan=train seed=3")),
    "seed": lambda one: record_expected(Case.parse(f"{LINE} plan=train+train seed=4")),
    "order": lambda one: changed(EXPECTED, microbatches=one.microbatches[::-1]),
    "fewer": lambda one: changed(EXPECTED, microbatches=one.microbatches[:2]),
    "weights": lambda one: changed(EXPECTED, **with_one("before", lambda p: p * 1.001)(one)),
}


@pytest.mark.parametrize("name", OTHER)
def test_records_of_other_steps_are_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(RecordError) as refusal:
        compare(EXPECTED, OTHER[name](EXPECTED.operations[0]))
    golden(str(refusal.value))


@pytest.mark.parametrize(
    ("law", "gap", "words"),
    [
        ("gradient", {"gradients": {}}, "nothing is {} of {}, nor of"),
        ("updated-parameters", {"parameters": {}}, "nothing is {} of {}, nor of"),
        ("grad-norm", {"norm": None}, "there is no norm to compare with"),
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_what_one_record_lacks_is_no_pass(law: str, gap: dict[str, Any], words: str, number: int) -> None:
    """As where a rank died half way."""
    lacking = changed(EXPECTED, number, **gap)
    verdict = compare(lacking, EXPECTED)
    assert (verdict.outcome, verdict.law(law).outcome) == ("unknown", "unknown")
    assert words.partition(" {}")[0] in verdict.law(law).note
    assert compare(EXPECTED, lacking).outcome in ("unknown", "fail")
    wrong = changed(EXPECTED, 1, losses=(9.0, 9.0, 9.0))
    assert compare(changed(EXPECTED, 0, **gap), wrong).outcome == "fail", "what is wrong later is observed all the same"


def test_a_run_that_kept_no_first_weights_is_judged_all_the_same() -> None:
    """Those before its second step are no first weights."""
    assert compare(EXPECTED, changed(EXPECTED, 0, before={})).outcome == "pass"
    assert compare(changed(EXPECTED, 0, before={}), EXPECTED).outcome != "fail"


def test_one_gradient_that_one_record_lacks_is_named() -> None:
    gradients = {name: one for name, one in EXPECTED.operations[0].gradients.items() if name != WEIGHT}
    lacking = changed(EXPECTED, gradients=gradients)
    for expected, observed, side in ((EXPECTED, lacking, "observed"), (lacking, EXPECTED, "expected")):
        verdict = compare(expected, observed)
        for law in (verdict.law("gradient"), verdict.law("presence")):
            assert law.left_out == (WEIGHT,)
            assert law.note == f"nothing is {side} of it: {WEIGHT}", "once, with the reason"


def test_a_crash_of_the_judge_or_of_a_rule_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> Any:
        raise ZeroDivisionError("a rule is wrong")

    wrong = changed(EXPECTED, losses=(9.0, 9.0, 9.0))
    with monkeypatch.context() as patch:
        patch.setattr("pipeproof.records.compare.explain_verdict", crash)
        verdict = compare(EXPECTED, wrong)
        assert (verdict.outcome, verdict.causes) == ("fail", ())
        assert verdict.unsought.partition(":")[0] == ZeroDivisionError.__name__
    monkeypatch.setattr("pipeproof.core.comparison.Comparison.norm", crash)
    assert [compare(EXPECTED, one).outcome for one in (EXPECTED, wrong)] == ["unknown", "fail"]
    assert compare(EXPECTED, EXPECTED).stopped.partition(":")[0] == ZeroDivisionError.__name__
