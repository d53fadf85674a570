"""The ledger: what a comparison does to its laws, and that a law without one is unknown."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeproof.core.ledger import HELD, Ledger
from pipeproof.core.limits import BF16, FP32, FP64
from pipeproof.core.measured import Compared
from pipeproof.core.observe.sketch import brief
from pipeproof.core.tolerance import Floor
from pipeproof.core.verdict import LawResult, Mismatch
from tests.support.golden import golden

FLOOR = Floor(1e-7, 1e-7, 0.1)
ONES = torch.ones(4)
Entry = Callable[[Ledger], None]


def ledger(*entries: Entry) -> Ledger:
    """Its second operation is a second step."""
    book = Ledger(("gradient", "second-step"))
    book.scenarios = ((), ("second-step",))
    for enter in entries:
        enter(book)
    return book


def outcomes(book: Ledger) -> list[str]:
    return [law.outcome for law in book.laws()]


def place(law: str = "gradient", operation: int = 1) -> Mismatch:
    return Mismatch(law, operation, rank=2, parameter="w")


def tensors(observed: Tensor, expected: Tensor, at: Mismatch | None = None, floor: Floor = FLOOR, **more: Any) -> Entry:
    return lambda book: book.tensors(at or place(), observed, expected, lambda: floor, **more)


def numbers(observed: float, expected: float) -> Entry:
    return lambda book: book.numbers(place(), observed, expected, lambda: FLOOR)


def held(law: str = "gradient", *, operation: int = 1, holds: bool = True) -> Entry:
    return lambda book: book.hold(place(law, operation), holds, "one", "another")


def doubted(book: Ledger) -> None:
    book.doubt("gradient", "why")


HUNDRED, NOISE = torch.full((2,), 100.0), torch.tensor([1e-9, -2e-9])
NOISY = tensors(2 * NOISE, NOISE, floor=Floor(0.0, 1.0, 0.0, size=2e-9))


@pytest.mark.parametrize(
    ("entries", "wanted", "note"),
    [
        ([], ["unknown", "unknown"], "nothing was compared"),
        ([lambda book: book.skip("second-step", "one step only")], ["unknown", "not applicable"], None),
        ([numbers(1.00005, 1.0), held("second-step")], ["unknown", "pass"], ""),  # neither rounding nor a fault
        ([numbers(math.nan, 1.0), doubted], ["fail", "unknown"], "why"),
        ([doubted, held()], ["unknown", "unknown"], "why"),
        ([held(), lambda book: book.remark("gradient", "by the way")], ["pass", "unknown"], "by the way"),
        ([NOISY], ["unknown", "unknown"], None),
        ([NOISY, tensors(NOISE, NOISE)], ["pass", "unknown"], None),
        ([held("second-step", operation=2)], ["unknown", "pass"], None),
        ([tensors(ONES * -3, ONES, place(operation=2))], ["fail", "fail"], ""),
        ([tensors(ONES * -3, ONES)], ["fail", "unknown"], ""),
    ],
)
def test_each_law_has_the_worst_outcome(entries: list[Entry], wanted: list[str], note: str | None) -> None:
    book = ledger(*entries)
    assert outcomes(book) == wanted
    assert book.failed == (wanted[0] == "fail" or note in ("", "why")), "rounding alone and nothing are no failures"
    assert note is None or book.laws()[0].note == note


@pytest.mark.parametrize(
    ("entry", "observed", "expected"),
    [
        (tensors(ONES * -3, ONES), "norm 6, -3 times expected, cosine -1.000000", "norm 2"),
        (tensors(torch.ones(2), torch.ones(3)), "shape [2]", "shape [3]"),
        (
            tensors(HUNDRED + 0.02, HUNDRED + 0.01, base=HUNDRED),
            "update of norm 0.0282795, 1.99924 times expected, cosine 1.000000",
            "update of norm 0.0141452",
        ),
        (tensors(HUNDRED * math.nan, HUNDRED, base=HUNDRED), "update of norm nan", "update of norm 0"),
        (numbers(math.nan, 1.0), "nan", "1"),
    ],
)
def test_a_fault_is_described(entry: Entry, observed: str, expected: str) -> None:
    book = ledger(entry)
    (one,) = book.mismatches
    assert (outcomes(book)[0], one.rank, one.parameter) == ("fail", 2, "w")
    assert (one.observed_text, one.expected_text) == (observed, expected)


def test_equal_bits_ask_for_no_floor_and_rounding_is_counted_and_kept_beside_them() -> None:
    book = ledger()
    book.numbers(place(), 2.0, 2.0, floor=lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    book.tensors(place(), ONES, ONES, floor=lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert book.tier(FP32) == "bitwise"
    assert book.laws()[0] == LawResult("gradient", "pass", 2, 2)
    assert [*book.compared.values()] == [Compared("gradient", 1, "pass", rank=2, parameter="w")]
    tensors(ONES * (1 + 2**-23), ONES)(book)
    (law, _), (one,) = book.laws(), book.compared.values()  # of several comparisons in one place the last
    assert (law.outcome, law.checked, law.exact, law.floor, book.mismatches) == ("pass", 3, 2, 1e-7, [])
    assert law.worst == one.error == pytest.approx(2**-23)
    assert (one.outcome, one.floor, one.limit, book.tier(FP32)) == ("pass", 1e-7, FLOOR.limit, "fp32")
    held(holds=False)(book)
    assert [*book.compared.values()] == [one]


def test_ledgers_of_several_ranks_are_one() -> None:
    one, other = Ledger(["loss", "gradient", "norm"]), Ledger(["loss", "gradient", "norm"])
    tensors(ONES, ONES)(one)
    tensors(-ONES, ONES)(other)
    other.doubt("loss", "nobody looked")
    other.skip("norm", "there is none")
    one.join(other)
    loss, gradient, norm = one.laws()
    assert (loss.outcome, loss.note) == ("unknown", "nobody looked")
    assert (gradient.outcome, gradient.worst) == ("fail", 2.0)
    assert (gradient.checked, gradient.exact, gradient.wrong) == (2, 1, 1)
    assert norm.outcome == "not applicable"
    assert len(one.mismatches) == 1
    assert one.tier(FP32) == "fp32"
    assert [each.outcome for each in one.compared.values()] == ["fail"]


START = torch.linspace(1, 2, 100).double()
MOVED = torch.full((100,), 1e-6).double().index_fill(0, torch.tensor(5), 1.2e-6)


def one_moved(far: float) -> Tensor:
    return MOVED.index_fill(0, torch.tensor(5), far)


@pytest.mark.parametrize(
    ("moved", "stored", "floor", "outcome"),
    [
        (2 * MOVED, 0.0, FLOOR, "fail"),
        (one_moved(1.0), 0.0, FLOOR, "unknown"),  # Adam may turn a single step around
        (one_moved(1e-6), 1e-6, FLOOR, "pass"),  # no more than storing it may do
        (1.01 * MOVED, 1e-6, FLOOR, "unknown"),  # as much, but of all elements
        (MOVED + 1e-15, 0.0, Floor(0.0, 0.0, 0.0, FP64), "pass"),  # what sums of weights lose
        (MOVED + 1e-12, 0.0, Floor(0.0, 0.0, 0.0, FP64), "fail"),
    ],
)
def test_how_far_weights_moved_is_judged_as_most_of_them_did(
    moved: Tensor, stored: float, floor: Floor, outcome: str
) -> None:
    book, base = ledger(), brief(START)
    book.sketches(place(), brief(START + moved), brief(START + MOVED), lambda: floor, base=(base, base), stored=stored)
    assert outcomes(book)[0] == outcome
    assert [one.observed.began for one in book.mismatches] == [base.norm] * (outcome != "pass")  # type: ignore[union-attr]


def test_sketches_where_nobody_measured_rounding_are_neither_right_nor_wrong() -> None:
    book, one = ledger(), torch.arange(8.0)  # each element has a projection of its own
    unmeasured = Floor(0.0, 0.0, 0.0, replace(FP32, least=0.0), nudged=math.inf)
    book.sketches(place(), brief(one), brief(one.clone()), lambda: unmeasured)
    assert outcomes(book)[0] == "pass"
    assert [each.outcome for each in book.compared.values()] == ["pass"]
    book.sketches(place(), brief(3 * one), brief(one), lambda: unmeasured)
    assert outcomes(book)[0] == "unknown"
    golden(book.mismatches[0].text_beside("expected") + book.mismatches[0].allowance)


def test_what_is_set_aside_is_counted_and_decides_nothing() -> None:
    book = ledger(held(operation=2), held(operation=2, holds=False))
    assert outcomes(book) == ["fail", "fail"]
    book.set_aside(book.mismatches, "every result is right")
    assert (outcomes(book), book.mismatches, book.tier(FLOOR.precision)) == (["pass", "pass"], [], "bitwise")
    assert [(law.checked, law.exact, law.wrong) for law in book.laws()] == [(2, 1, 0), (2, 1, 0)]
    golden(book.laws()[0].note)


def test_weights_that_stand_still_moved_alike_and_what_is_finite_on_no_side_tells_nothing() -> None:
    book, one, other = ledger(), brief(torch.ones(9)), brief(torch.full((9,), 1.5))
    book.sketches(place(), other, one, lambda: FLOOR, base=(other, one))
    assert outcomes(book)[0] == "pass"
    endless, lost = (brief(torch.full((9,), value)) for value in (math.inf, math.nan))
    book.sketches(place(), endless, lost, lambda: FLOOR)
    assert outcomes(book)[0] == "pass"
    golden(book.laws()[0].note)
    book.sketches(place(), one, lost, lambda: FLOOR)
    assert outcomes(book)[0] == "fail"


def test_gradients_of_all_ranks_that_lead_one_way_are_unknown_although_each_passes() -> None:
    floor = Floor(0.004, 0.004, 0.1, BF16, led=0.006)
    ranks = [replace(place(), rank=rank, parameter=f"w{rank}") for rank in range(5)]
    factors = (1.01, 1.01, 1.01, 1.01, 1.0)
    books = [ledger(tensors(ONES * by, ONES, at, floor)) for at, by in zip(ranks, factors, strict=True)]
    assert {outcomes(book)[0] for book in books} == {"pass"}
    for book in books[1:4]:
        books[0].join(book)
    assert outcomes(books[0])[0] == "unknown"
    told = "none alone proves a fault, but all 4 beyond pure rounding are 1.01 to 1.01 times what is expected"
    assert books[0].laws()[0].note.startswith(told)
    nothing = replace(place(), parameter="nothing")
    tensors(0 * ONES, 0 * ONES, nothing, floor)(books[0])
    tensors(7 * ONES, ONES, nothing, replace(floor, size=30.0))(books[0])
    assert outcomes(books[0])[0] == "unknown", "zeros and rounding alone clear none of them"
    books[0].join(books[4])
    assert outcomes(books[0])[0] == "pass"


@pytest.mark.parametrize(
    ("law", "floor", "apart", "outcome"),
    [
        ("gradient", Floor(0.0, 1e-3, 0.5, BF16), 1e-3, "unknown"),
        ("gradient", Floor(0.0, 1e-3, 0.5, BF16), 1e-7, "pass"),  # as another sum in fp32
        ("gradient", Floor(0.0, 1e-3, 0.5, BF16), 0.3, "fail"),
        ("gradient", Floor(0.0, 1e-5, 0.5, FP32), 1e-5, "pass"),  # what fp32 measures hides little
        ("gradient", Floor(0.0, 0.0, 0.0, BF16, size=1.0), 1e-3, "pass"),  # rounding alone
        ("second-step", Floor(0.0, 1e-3, 0.5, BF16), 1e-3, "pass"),  # no law that is held
    ],
)
def test_after_what_was_bit_for_bit_no_narrow_type_excuses(law: str, floor: Floor, apart: float, outcome: str) -> None:
    book = ledger(tensors(ONES, ONES, place(law)))
    book.held = book.exact
    assert book.held == ({"gradient"} if law == "gradient" else set())
    tensors(ONES * (1 + apart), ONES, place(law), floor)(book)
    assert dict(zip(("gradient", "second-step"), outcomes(book), strict=True))[law] == outcome
    assert (HELD.format(floor.precision.name) in book.laws()[0].note) == (outcome == "unknown")
    assert book.exact == frozenset()


@pytest.mark.parametrize(
    ("law", "microbatch", "outcome"),
    [("loss", None, "pass"), ("grad-norm", None, "pass"), ("loss", 0, "unknown"), ("grad-norm", 0, "unknown")],
)
def test_a_sum_may_come_right_by_chance(law: str, microbatch: int | None, outcome: str) -> None:
    book = Ledger((law,))
    book.held = frozenset({law})
    book.numbers(Mismatch(law, 1, microbatch=microbatch), 1.0001, 1.0, lambda: Floor(0.0, 1e-3, 0.5, BF16))
    assert outcomes(book) == [outcome]
