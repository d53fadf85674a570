"""Why two records differ: every answer, on records that the reference made and on some that were changed."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pipeproof.core.verdict import JUDGED
from pipeproof.own.case import Case
from pipeproof.records.case_record import record_expected
from pipeproof.records.compare import RUNS, compare
from pipeproof.records.difference import Difference, difference
from pipeproof.records.record import OtherSteps, Record, config_differences
from tests.support.golden import golden

LINE = "1f1b r2 s2 m3 split=1,1 model=mlp plan=train seed=3"
ONE = record_expected(Case.parse(LINE))
OTHER = record_expected(Case.parse(LINE.replace("1f1b r2 s2 m3 split=1,1", "gpipe r1 s1 m3 split=2")))


def run_of(record: Record, config: Mapping[str, object] = {}, **fields: Any) -> Record:
    """What a run gave that is as ``record``, but for some fields of its operation and words of its config."""
    operations = (replace(record.operations[0], floors=None, **fields),)
    return replace(record, kind="observed", operations=operations, config={**record.config, **config})


def scaled(record: Record, by: float) -> dict[str, object]:
    """All gradients of ``record``, times this."""
    return {name: None if one is None else one * by for name, one in record.operations[0].gradients.items()}


def why(one: Record, other: Record) -> Difference:
    try:
        numbers = compare(one, other, sides=RUNS if one.kind == "observed" else JUDGED)
    except OtherSteps as error:
        return difference(one, other, error, ("a", "b"))
    return difference(one, other, numbers, ("a", "b"))


def test_numbers_that_agree_bit_for_bit_need_no_reason() -> None:
    assert why(run_of(ONE), run_of(ONE)).reason == "same"


def test_another_order_of_sums_is_rounding_and_its_size_is_told() -> None:
    found = why(run_of(ONE), run_of(OTHER))
    assert (found.reason, found.fields, found.next) == ("rounding", ("schedule", "pp", "split"), ())
    golden(found.said)
    sizes = re.fullmatch(r"a gradient by (\S+), where rounding alone makes (\S+)", found.size)
    assert sizes, found.size
    observed, alone = map(float, sizes.groups())  # which digits they have depends on the CPU's vector units
    assert 1e-8 < observed < 4 * alone < 4e-6


def test_fields_that_order_sums_explain_what_numbers_of_a_coarse_dtype_leave_open() -> None:
    """Steps of some parameters vanish in the rounding of bf16, so that numbers alone are no proof."""
    line = "r2 s2 m4 split=1,1 model=mlp dtype=bf16 plan=train seed=3"
    one, other = (record_expected(Case.parse(f"{name} {line}")) for name in ("1f1b", "gpipe"))
    assert compare(one, other).outcome == "unknown"
    found = why(run_of(one), run_of(other))
    assert (found.reason, found.fields) == ("rounding", ("schedule",)), found.said
    assert found.size


def test_numbers_that_differ_without_a_field_that_says_why_are_not_explained_by_one() -> None:
    found = why(run_of(ONE), run_of(ONE, gradients=scaled(ONE, 1 + 1e-7)))
    assert (found.reason, found.fields) == ("unknown", ())
    golden(found.said)
    assert found.size.startswith("a gradient by ")


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        (LINE.replace("seed=3", "seed=4"), ("seed",)),
        (LINE.replace("plan=train", "plan=train loss=tokens"), ("loss",)),
        (LINE.replace("plan=train", "plan=train dtype=bf16"), ("dtype",)),
        (LINE.replace("plan=train", "plan=train+train"), ("plan",)),
        (LINE.replace("split=1,1", "split=2,1"), ("split",)),
        (LINE.replace("1f1b", "gpipe").replace("m3", "m4"), ("microbatches",)),
    ],
)
def test_a_field_that_asks_for_another_answer_is_named(line: str, fields: tuple[str, ...]) -> None:
    found = why(run_of(ONE), record_expected(Case.parse(line)))
    assert (found.reason, found.fields) == ("asked", fields), found.said
    golden(found.said)


@pytest.mark.parametrize("sides", [("one",), ("other",), ("one", "other")])
def test_a_side_that_is_wrong_by_its_own_config_is_named(sides: tuple[str, ...]) -> None:
    good = {"one": ONE, "other": OTHER}
    records = [
        run_of(one, gradients=scaled(one, 2 + number)) if name in sides else run_of(one)
        for number, (name, one) in enumerate(good.items())
    ]
    found = why(*records)
    assert found.reason == "fault"
    assert found.said.startswith(f"a fault: {' and '.join(sides)} ")
    assert [side.outcome for side in found.sides] == ["fail" if name in sides else "pass" for name in good]
    wrong = next(str(side) for side in found.sides if side.outcome == "fail")
    golden(wrong, numbers=False)
    files = {"one": "a", "other": "b"}
    assert [line for line in found.next if "compare" in line] == [
        f"pipeproof compare expected.safetensors {files[name]}" for name in sides
    ]


def test_a_fault_is_told_where_another_answer_was_asked_for_too() -> None:
    seeded = record_expected(Case.parse(LINE.replace("seed=3", "seed=4")))
    assert why(run_of(ONE), run_of(seeded, gradients=scaled(seeded, 2))).reason == "fault"


UNKNOWN: Mapping[str, dict[str, Any]] = {
    "no case": {"config": {"case": None}},
    "no line": {"config": {"case": "gibberish"}},
    "lost file": {"config": {"case": "no-such.csv r2 s2 m3"}},
    "torch": {"config": {"torch": "1.0"}},
    "no torch": {"config": {"torch": None}},
    "pipeproof": {"config": {"pipeproof": "0.0"}},
    "weights": {"before": OTHER.operations[0].parameters},
    "microbatches": {"microbatches": ONE.operations[0].microbatches[::-1]},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_side_of_which_nothing_is_due_here_leaves_the_reason_unknown(name: str) -> None:
    found = why(run_of(ONE), run_of(OTHER, **UNKNOWN[name]))
    assert found.reason == "unknown"
    assert [side.outcome for side in found.sides] == ["pass", "not computed"]
    golden(str(found.sides[1]))


def test_a_side_that_is_not_decided_leaves_the_reason_unknown() -> None:
    noted = run_of(OTHER, gradients=scaled(OTHER, 1 + 5e-6))
    found = why(run_of(ONE), noted)
    assert (found.reason, found.sides[1].outcome) == ("unknown", "unknown"), found.rows
    assert found.next[-1].split()[:2] == ["pipeproof", "compare"]


def test_a_crash_while_a_side_is_computed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> Any:
        raise ZeroDivisionError("no reference")

    monkeypatch.setattr("pipeproof.records.difference.record_expected", crash)
    found = why(run_of(ONE), run_of(OTHER))
    assert found.reason == "unknown"
    golden(str(found.sides[0]).rpartition(" (")[0])


def test_axes_of_older_records_have_the_names_of_newer_ones() -> None:
    older = {{"pp": "ranks", "dp": "replicas"}.get(name, name): value for name, value in ONE.config.items()}
    assert not list(config_differences(ONE, replace(ONE, config=older)))
    assert list(config_differences(OTHER, replace(ONE, config=older)))[1] == ("pp", 1, 2)
