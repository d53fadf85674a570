"""What a tensor is in place of the expected one: said where its content tells it, and left open where it does not."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pipeproof.core.observe.likeness import GRADIENT, Label
from pipeproof.core.observe.recording import GIVEN, Point
from pipeproof.core.observe.sketch import sketch
from pipeproof.core.tolerance import error
from pipeproof.explain.known import Alike
from pipeproof.explain.likeness import find_rounding, is_reordered, likeness, plainly
from pipeproof.explain.sketches import is_rounded_sketch
from tests.support.golden import golden


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


EXPECTED = drawn(0, 8, 16)


@pytest.mark.parametrize(
    ("observed", "kind"),
    [
        (EXPECTED.flip(0), "reordered"),
        (EXPECTED.flip(1), "reordered"),
        (EXPECTED.flip(0) + 1e-3, "different"),
        (drawn(2, 8, 16), "different"),
        (EXPECTED + drawn(2, 8, 16), "different"),  # no more of it is its own than is not
        (EXPECTED + 0.1, "sum"),
        (EXPECTED + 0.1 * EXPECTED.abs(), "different"),
        (EXPECTED * torch.linspace(0.8, 0.95, 16), "different"),
        (EXPECTED + 0.1 * torch.linspace(-1, 1, 128).view(8, 16), "different"),
    ],
    ids=["rows", "elements", "rows and more", "another", "too much", "a constant", "its size", "by column", "a slope"],
)
def test_what_a_tensor_is(observed: Tensor, kind: str) -> None:
    found = likeness(observed, EXPECTED, Label(Point(1, 0, GIVEN)))
    assert found.kind == kind
    golden(found.text, numbers=False)


LIMIT = 1e-5
KNOWN = [drawn(number, 40, 50) for number in range(6)]


def near(observed: Tensor, known: Sequence[Tensor] = KNOWN) -> list[int]:
    """The numbers of those that ``observed`` is near."""
    found = Alike()
    found.owned += [([Label(Point(0, number, GIVEN))], tensor) for number, tensor in enumerate(known)]
    return [label.point.microbatch for (label,), _ in found.find_near(observed, LIMIT)]


@pytest.mark.parametrize("k", range(len(KNOWN)))
def test_what_is_near_is_found_as_if_each_were_compared(k: int) -> None:
    for observed in (KNOWN[k], KNOWN[k] * (1 + LIMIT / 2), KNOWN[k] * (1 + 2 * LIMIT), KNOWN[k] * torch.nan):
        assert near(observed) == [n for n, one in enumerate(KNOWN) if error(observed, one) <= LIMIT]
    assert near(KNOWN[k]) == [k]
    for element in range(0, 2000, 111):  # also one that no sample holds
        observed = KNOWN[k].clone()
        observed.view(-1)[element] += 1.0
        assert not near(observed)


COARSE, FINE = 2.0**-6, 2.0**-19  # what rounding leaves in bf16 and in fp32
WIDE, SQUARE = drawn(0, 48, 32, dtype=torch.float64), drawn(0, 32, 32, dtype=torch.float64)
BIG, OTHER = drawn(0, 200, 200, dtype=torch.float64), drawn(1, 200, 200, dtype=torch.float64)
ROWS, COLUMNS, ALL = (torch.randperm(n, generator=torch.Generator().manual_seed(3)) for n in (48, 32, 48 * 32))
NOISE = drawn(1, 48, 32, dtype=torch.float64)


def rounded(tensor: Tensor, limit: float) -> Tensor:
    return tensor * (1 + limit / 8 * drawn(9, *tensor.shape, dtype=torch.float64))


def with_row(row: Tensor | float) -> Tensor:
    made = WIDE.clone()
    made[3] = row
    return made


ORDERS = {
    "half down": (WIDE.roll(24, 0), True),
    "rows": (WIDE[ROWS], None),
    "columns": (WIDE[:, COLUMNS], None),
    "reversed": (WIDE.flip(1), True),
    "one on": (WIDE.roll(1), True),
    "two rows": (torch.cat([WIDE[:1], WIDE[1:3].flip(0), WIDE[3:]]), None),
    "all": (WIDE.flatten()[ALL].view(WIDE.shape), False),  # of many numbers of one kind some order always fits nearly
    "transposed": (SQUARE.T, True),
}


@pytest.mark.parametrize("title", ORDERS)
def test_lines_and_shifts_are_told_however_coarse_the_type(title: str) -> None:
    """None: not always, in a coarse one."""
    made, coarse = ORDERS[title]
    says = SQUARE if made.shape == SQUARE.shape else WIDE
    assert is_reordered(rounded(made, FINE), says, FINE)
    assert coarse is None or is_reordered(rounded(made, COARSE), says, COARSE) is coarse


@pytest.mark.parametrize(
    ("observed", "says", "limit"),
    [
        (BIG, OTHER, COARSE),  # although, sorted, they differ by no more than rounding
        (BIG, OTHER, 4 * COARSE),
        *((WIDE + noise * COARSE * NOISE, WIDE, COARSE) for noise in (2.0, 8.0, 32.0)),
        (with_row(WIDE[5]), WIDE, COARSE),
        (with_row(0.0), WIDE, COARSE),
        (WIDE, WIDE, COARSE),
        (WIDE, 0 * WIDE, COARSE),
        (0 * WIDE, WIDE, COARSE),
        (WIDE.T, WIDE, COARSE),
    ],
)
def test_what_is_no_order(observed: Tensor, says: Tensor, limit: float) -> None:
    assert not is_reordered(observed, says, limit)


def test_numbers_of_one_kind_differ_by_rounding_once_they_are_sorted() -> None:
    one, other = BIG.flatten().sort()[0], OTHER.flatten().sort()[0]
    assert (one - other).norm() / other.norm() < COARSE


WHOLE = drawn(0, 40, 16) * 1e-2
DOUBLE = WHOLE.double() / 3
# Sums of bf16 have few digits: all of 16 may be in a narrower type, and one that is expected may not.
FEW = torch.arange(16.0) + 16.25


@pytest.mark.parametrize(
    ("observed", "whole", "name"),
    [
        (WHOLE.bfloat16().float(), WHOLE, "bf16"),
        (WHOLE.half().float(), WHOLE, "fp16"),
        (DOUBLE.float().double(), DOUBLE, "fp32"),  # of fp64 alone
        (FEW, FEW + 2.0**-9, "bf16"),
        (FEW, FEW + torch.tensor([2.0**-9, *[0.0] * 15]), ""),
        (WHOLE, WHOLE, ""),
        (WHOLE * 1.001, WHOLE, ""),
        (WHOLE + 1e-5 * drawn(1, 40, 16), WHOLE, ""),
        (torch.where(WHOLE > 0, WHOLE, 0.0), WHOLE, ""),
        (WHOLE.flip(0).half().float(), WHOLE, ""),  # rounded, and more than that
        (WHOLE.clamp(-1e-3, 1e-3), WHOLE, ""),
        ((WHOLE * 300).half().float() / 300, WHOLE, ""),
        (DOUBLE.float().double() * (1 + 1e-12), DOUBLE, ""),
        (torch.full((64,), 1.1), torch.ones(64), ""),  # as of a norm's weights that had something added
    ],
)
def test_a_narrower_type_is_told_and_other_changes_are_no_rounding(observed: Tensor, whole: Tensor, name: str) -> None:
    assert find_rounding(observed, whole) == name


def test_fp32_is_a_narrower_type_of_fp64_alone() -> None:
    assert is_rounded_sketch(sketch(DOUBLE.float().double()), sketch(DOUBLE))
    assert not sketch(WHOLE).narrow


def test_what_a_narrow_type_can_say_is_not_rounded_where_that_type_is_due() -> None:
    observed, expected = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.0, 3.015625, 4.0])
    at = Label(Point(0, -1, GRADIENT), name="bias")
    assert plainly(observed, expected.to(torch.bfloat16), at) is None
    rounded = plainly(observed, expected + 1e-4, at)
    assert rounded.kind == "rounded"
