"""What no cause can have led to is told; what may follow from one is not."""

from types import SimpleNamespace
from typing import Any

import pytest

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Mismatch, Verdict
from pipeproof.explain.uncovered import with_uncovered
from tests.support.golden import golden

TIED = Mismatch("tied-copies", 1, parameter="embed")
LOSS = Mismatch("loss", 1, what="number", observed=2.0, expected=1.0, microbatch=2)
LAST = Mismatch("gradient", 1, stage=1, parameter="w", error=1.0, limit=1e-6)
FIRST = Mismatch("gradient", 1, stage=0, parameter="v", error=1.0, limit=1e-6)
CALLS = Mismatch("microbatches", 1, stage=0, what="forward", observed=(0, 0), expected=(0, 1))


def left(
    causes: tuple[Cause, ...],
    *wrong: Mismatch,
    unknown: tuple[str, ...] = (),
    gradients: Any = (1,),
    operation: str = "train",
) -> tuple[str, ...]:
    verdict = Verdict("case", "fail", "none", (), wrong, causes, undecided=unknown)
    expected = SimpleNamespace(update=SimpleNamespace(shared=frozenset({(0, "embed"), (1, "embed")})))
    found = SimpleNamespace(unknown=unknown)
    evidence: Any = SimpleNamespace(right=expected, stages=2, attribution=found, gradients=gradients, playable=None)
    evidence.operation = operation
    return with_uncovered(verdict, evidence).undecided


@pytest.mark.parametrize(
    ("cause", "wrong", "told"),
    [
        (Cause("not-reduced", stage=0, parameter="v", parameters=("v",)), TIED, "tied-copies of embed"),
        (Cause("not-reduced", stage=0, parameter="v", parameters=("v", "u")), LAST, "gradient of w in stage 1"),
        (Cause("not-reduced", stage=0, parameter="v", parameters=("v", "u")), FIRST, ""),
        (Cause("missing", stage=1, parameter="w", parameters=("w",)), FIRST, ""),  # what is cut off flows on nowhere
        (Cause("stale-gradient", stage=0), LOSS, "loss of microbatch 2"),
        (Cause("dropped", stage=1, microbatches=(2,)), LOSS, "loss of microbatch 2"),
        (Cause("scale", factor=2.0), LOSS, ""),
        (Cause("mispaired", stage=0, action="0B1"), LOSS, "loss of microbatch 2"),
        (Cause("mispaired", stage=0, action="0F1"), LOSS, ""),
        (Cause("scale", stage=0, factor=2.0), LAST, "gradient of w in stage 1"),
        (Cause("scale", stage=1, factor=2.0), FIRST, ""),
        (Cause("computation", stage=1), FIRST, ""),
        (Cause("scale", factor=2.0), CALLS, "microbatches in stage 0"),
        (Cause("dropped", stage=1, microbatches=(1,)), CALLS, ""),
        (Cause("norm"), LAST, "gradient of w in stage 1"),
        (Cause("tied-not-summed", parameter="embed"), TIED, ""),
        (Cause("tied-not-summed", parameter="embed"), FIRST, "gradient of v in stage 0"),
    ],
)
def test_what_a_cause_cannot_have_led_to_is_listed(cause: Cause, wrong: Mismatch, told: str) -> None:
    assert [one.partition(": ")[2] for one in left((cause,), wrong)] == ([told] if told else [])


def test_any_cause_may_have_led_to_it_and_what_is_open_is_not_told_twice() -> None:
    here, everywhere = Cause("stale-gradient", stage=0), Cause("computation", stage=0)
    assert left((here, everywhere), LOSS, LAST) == ()
    golden("\n".join(left((here,), LOSS, LAST, unknown=("stage 1: nothing",))))


def test_of_weights_that_moved_in_an_operation_without_an_update_anything_may_follow() -> None:
    moved = Cause("update", stage=1, parameter="w")
    assert left((moved,), LOSS, FIRST, CALLS, operation="eval") == ()
    assert len(left((moved,), FIRST)) == 1


def test_without_a_cause_all_is_open() -> None:
    golden("\n".join(left((), CALLS, LOSS)))
    assert left((), CALLS, unknown=("why",)) == ("why",)
    assert left((), CALLS, gradients=()) == (), "ranks of a chain find causes of their own"
