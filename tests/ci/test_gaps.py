"""Gaps: floors and effects measured, and what nobody can see said to be unseen."""

import math
from collections.abc import Iterator

import gaps
import pytest
import torch
from gaps import Row, measured
from least_faults import LeastFault, Step, Total

from pipeproof.core.tolerance import error
from pipeproof.reference.data import Shapes, microbatches
from pipeproof.reference.step import Reference


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {dtype: measured("mlp", dtype=dtype, count=4) for dtype in ("fp32", "bf16", "fp64")}


@pytest.mark.long
def test_floors_follow_the_dtype_and_effects_do_not(rows: dict[str, Row]) -> None:
    units = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp64": 2.0**-53}
    for dtype, row in rows.items():
        assert units[dtype] / 2 < min(row.permutation, row.rounding)
        assert max(row.permutation, row.rounding) < 32 * units[dtype]
        for fault in ("divisor", "drop", "LayerNorm drop"):
            assert row.gaps[fault].effect == pytest.approx(rows["fp64"].gaps[fault].effect, rel=0.5)


def test_fp32_tells_every_fault_from_rounding_and_bf16_does_not(rows: dict[str, Row]) -> None:
    for row in (rows["fp32"], rows["fp64"]):
        assert all(found.decades > 1 and found.outcome != "pass" for found in row.gaps.values())
    hidden = rows["bf16"].gaps["token weight"]
    assert hidden.decades < -1
    assert hidden.outcome == "pass"
    assert rows["bf16"].gaps["sum bf16"] is rows["bf16"].gaps["boundary bf16"] is None
    assert rows["bf16"].gaps["drop"].outcome == "fail"


def test_a_model_without_layer_norms_has_no_such_fault() -> None:
    row = measured("batchnorm", dtype="fp32", count=2)
    assert row.gaps["LayerNorm drop"] is None
    assert row.gaps["drop"] is not None


def test_a_fault_that_changes_nothing_is_unseen_by_bits_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(step: Step) -> Iterator[Total]:
        yield {site: None if gradient is None else gradient.clone() for site, gradient in step.right.items()}

    monkeypatch.setattr(gaps, "FAULTS", (LeastFault("nothing", "nothing is wrong", same),))
    nothing = measured("mlp", dtype="fp32", count=2).gaps["nothing"]
    assert (nothing.effect, nothing.outcome, nothing.unseen, nothing.variants) == (0.0, "pass", 1, 1)
    assert nothing.decades == -math.inf


def test_the_hardest_variant_counts_and_the_easiest_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two variants: one gradient off by a tenth and another by a hundredth; and all off by 5e-5."""

    def two(step: Step) -> Iterator[Total]:
        right = {site: gradient for site, gradient in step.right.items() if gradient is not None}
        first, second, *_ = right
        yield {**step.right, first: right[first] * 1.1, second: right[second] * 1.01}
        yield {site: gradient * 1.00005 for site, gradient in right.items()}

    monkeypatch.setattr(gaps, "FAULTS", (LeastFault("two", "two variants", two),))
    row = measured("mlp", dtype="fp32", count=2)
    found = row.gaps["two"]
    assert found.effect == pytest.approx(5e-5, rel=1e-3)
    assert found.floor <= max(row.permutation, row.rounding)
    assert (found.outcome, found.unseen, found.variants) == ("unknown", 0, 2)


def test_fp64_and_fp32_references_tell_the_same_of_bf16() -> None:
    """The floor of bf16 is measured against fp64; against an fp32 reference it is the same to a percent."""
    batches = microbatches("mlp", count=4, shapes=Shapes(), seed=0)
    narrow = gaps._step("mlp", "bf16", [batch.cast(torch.bfloat16) for batch in batches], 0)
    wide = gaps._widened(gaps._step("mlp", "bf16", narrow.batches, 0))
    single = gaps._step("mlp", "bf16", [batch.cast(torch.float32) for batch in narrow.batches], 0)
    float32 = Step(
        Reference(single.reference.model.float(), owner=single.owner, recipe=single.recipe),
        single.owner,
        single.batches,
        single.recipe,
    )
    for site, gradient in narrow.right.items():
        against = [error(gradient, other) for step in (wide, float32) if (other := step.right[site]) is not None]
        assert against[0] == pytest.approx(against[1], rel=0.01)
