"""The functional and the asynchronous pipeline: what is right passes, faults are named; all are in the campaign."""

import pytest
import truth_async
import truth_functional
import truth_jobs
from truth_check import check
from truth_jobs import Job
from truth_trial import Trial

from pipeproof.core.cause import KINDS
from pipeproof.whitebox import WhiteBox
from tests.support.sweeps import SWEEP

ROWS: dict[str, Trial | Job] = {
    one.title: one for part in (truth_functional, truth_async, truth_jobs) for one in (*part.rights(), *part.faults())
}
# Kinds of steps that were judged wrongly once, and the others of the same kind in a sweep.
SILENT = (
    *("functional: right, vjp", "functional: right, value, last in first out", "functional: right, gradients_of_rows"),
    *("functional: right, padding in the middle", "async: right, padding in the middle, against itself"),
    *("functional: right, one replica filled up", "async: right, one replica filled up, against itself"),
    *("functional: right, rows filled up", "functional: right, evaluation in bf16 in two parts"),
    *("async: right, weights written late", "async: right, weights gathered late, evaluation between"),
    *("functional: right, replicas, handed back flat alone", "functional: right, replicas, flat, against itself"),
    *("job, functional: right, replicas, flat, single", "async: right, greedy worker and thread"),
    "functional: right, halves of layers, grad",
)
# Where the stages alone may not tell, unknown is an answer, too.
NO_FAULT = (
    *("async: right, weights gathered late, against itself", "async: right, two halves of rows, against itself"),
    *("functional: right, rows filled up, against itself", "functional: right, vjp, against itself"),
)
NAMED = {
    "functional: sums of the step before": "stale-gradient",
    "async: main gradients of the parameter not cleared": "stale-gradient",
    "async: main gradients of the module not cleared": "stale-gradient",
    "functional: weights of the step before": "stale-tensor",
}
CAUGHT = (
    *("job, async: main gradients not cleared, composed", "job, async: old casts of weights, small steps, single"),
    *("async: old casts of weights, small steps", "functional: a part is sent back, grad"),
    *("async: replicas drawn apart, a list, of its own build", "functional: replicas drawn apart, a list"),
    *("async: padding weighs half", "async: gathered before the update", "async: first half sent back, against itself"),
    *("async: read before it came", "async: sent out of one buffer", "functional: newest pullback, vjp"),
)
SWEPT = (
    *("functional: right, value, last in first out", "functional: right, replicas, handed back flat alone"),
    *("async: right, padding in the middle, against itself", "async: right, greedy worker and thread"),
    *("async: main gradients of the parameter not cleared", "functional: replicas drawn apart, a list"),
    *("functional: right, vjp, against itself", "functional: right, rows filled up, against itself"),
)


def swept(titles: object) -> list[object]:
    """The titles as parameters, some for a sweep."""
    return [pytest.param(one, marks=SWEEP if one in SWEPT else ()) for one in titles]  # type: ignore[attr-defined]


def test_every_row_has_a_truth() -> None:
    assert {kind for one in ROWS.values() for kind in one.truth.kinds} <= set(KINDS)
    for part in (truth_functional, truth_async):
        right, wrong = part.rights(), part.faults()
        assert not any(one.truth.kinds for one in right)
        assert all(one.truth.kinds for one in wrong)
        assert min(len(right), len(wrong)) >= 30
        assert len({one.title for one in (*right, *wrong)}) == len(right) + len(wrong)
        assert len({one.truth.kinds[0] for one in wrong}) >= 12
    assert {*SILENT, *NO_FAULT, *NAMED, *CAUGHT, *SWEPT} <= set(ROWS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("title", swept(SILENT))
def test_nothing_is_said_against_what_is_right(whitebox: WhiteBox, title: str) -> None:
    found = ROWS[title].verdict(whitebox, watched=True)
    assert (found.failure, found.outcome) == ("", "pass"), str(found)


@pytest.mark.sweep
@pytest.mark.parametrize("title", swept(NO_FAULT))
def test_what_is_right_never_fails_against_itself(whitebox: WhiteBox, title: str) -> None:
    one = ROWS[title]
    found = one.verdict(whitebox, watched=True)
    assert (found.failure, check(found, one.truth, one.counts).false) == ("", ()), str(found)


@pytest.mark.parametrize("title", swept(NAMED))
def test_a_fault_is_named(whitebox: WhiteBox, title: str) -> None:
    one = ROWS[title]
    found = one.verdict(whitebox, watched=True)
    assert [cause.kind for cause in found.causes] == [NAMED[title]], str(found)
    assert check(found, one.truth, one.counts).false == (), str(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("title", swept(CAUGHT))
def test_a_fault_is_caught_and_nothing_false_is_said_of_it(whitebox: WhiteBox, title: str) -> None:
    one = ROWS[title]
    verdict = one.verdict(whitebox, watched=True)
    found = check(verdict, one.truth, one.counts)
    assert (found.caught, found.false) == (True, ()), str(verdict)
