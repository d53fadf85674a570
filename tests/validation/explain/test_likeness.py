"""What a tensor is in place of the expected one: said where its content tells it, and left open where it does not."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from pipeproof.core.observe.likeness import Label, Likeness
from pipeproof.core.observe.recording import GIVEN, Point
from pipeproof.core.observe.sketch import sketch
from pipeproof.core.tolerance import error
from pipeproof.explain.known import Alike
from pipeproof.explain.likeness import find_rounding, is_reordered, likeness
from pipeproof.explain.sketches import is_rounded_sketch
from tests.support.golden import golden

AT = Label(Point(1, 0, GIVEN))


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


EXPECTED = drawn(0, 8, 16)


def what(observed: Tensor) -> Likeness:
    found = likeness(observed, EXPECTED, AT)
    assert found is not None
    return found


def test_rows_and_elements_in_another_order() -> None:
    golden(what(EXPECTED.flip(0)).text)
    golden(what(EXPECTED.flip(1)).text)
    assert what(EXPECTED.flip(0) + 1e-3).kind != "reordered"


@pytest.mark.parametrize(
    "observed",
    [
        drawn(2, 8, 16),
        EXPECTED + drawn(2, 8, 16),  # no more of it is its own than is not
        EXPECTED + 0.1,
        EXPECTED + 0.1 * EXPECTED.abs(),
        EXPECTED * torch.linspace(0.8, 0.95, 16),
        EXPECTED + 0.1 * torch.linspace(-1, 1, 128).view(8, 16),
    ],
    ids=["another", "too much", "a constant", "its size", "scaled by column", "a slope"],
)
def test_what_is_no_noise_is_not_called_so(observed: Tensor) -> None:
    assert what(observed).kind in ("different", "sum")


LIMIT = 1e-5


def alike(tensors: Sequence[Tensor]) -> Alike:
    found = Alike()
    found.owned += [([Label(Point(0, number, GIVEN))], tensor) for number, tensor in enumerate(tensors)]
    return found


def near(observed: Tensor, known: Sequence[Tensor], limit: float) -> list[int]:
    """The numbers of those that ``observed`` is near."""
    return [label.point.microbatch for (label,), _ in alike(known).find_near(observed, limit)]


def tensors() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(40, 50, generator=draw) for _ in range(6)]


def test_what_is_near_is_found_as_if_each_were_compared() -> None:
    known = tensors()
    for k, tensor in enumerate(known):
        for observed in (tensor, tensor * (1 + LIMIT / 2), tensor * (1 + 2 * LIMIT)):
            assert near(observed, known, LIMIT) == [n for n, one in enumerate(known) if error(observed, one) <= LIMIT]
        assert near(tensor, known, LIMIT) == [k]


def test_an_element_that_no_sample_holds_is_not_overlooked() -> None:
    known = tensors()
    for element in range(0, 2000, 111):
        observed = known[2].clone()
        observed.view(-1)[element] += 1.0
        assert not near(observed, known, LIMIT)


def test_what_is_not_a_number_is_near_nothing() -> None:
    known = tensors()
    assert not near(known[0] * float("nan"), known, LIMIT)


COARSE, FINE = 2.0**-6, 2.0**-19  # what rounding leaves in bf16 and in fp32
SHAPE = (48, 32)


def drawn_wide(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rounded(tensor: Tensor, limit: float) -> Tensor:
    return tensor * (1 + limit / 8 * drawn_wide(9, tuple(tensor.shape)))


ORDERS: list[Callable[[Tensor], Tensor]] = [
    lambda one: one.roll(24, 0),
    lambda one: one[torch.randperm(48, generator=torch.Generator().manual_seed(3))],
    lambda one: one[:, torch.randperm(32, generator=torch.Generator().manual_seed(3))],
    lambda one: one.flip(1),
    lambda one: one.roll(1),
    lambda one: torch.cat([one[:1], one[1:3].flip(0), one[3:]]),
]


@pytest.mark.parametrize(
    ("change", "limit"), [*((one, FINE) for one in ORDERS), *((ORDERS[k], COARSE) for k in (0, 3, 4))]
)
def test_lines_and_shifts_are_told_however_coarse_the_type(change: Callable[[Tensor], Tensor], limit: float) -> None:
    assert is_reordered(rounded(change(drawn_wide(0)), limit), drawn_wide(0), limit)


def test_a_transposed_weight_is_told_however_coarse_the_type() -> None:
    one = drawn_wide(0, (32, 32))
    assert is_reordered(rounded(one.T, COARSE), one, COARSE)


def test_any_order_of_many_elements_is_told_in_a_fine_type_only() -> None:
    """In a coarse one some order of many numbers of one kind always fits."""
    one = drawn_wide(0)
    mixed = one.flatten()[torch.randperm(one.numel(), generator=torch.Generator().manual_seed(3))].view(SHAPE)
    assert is_reordered(rounded(mixed, FINE), one, FINE)
    assert not is_reordered(rounded(mixed, COARSE), one, COARSE)


@pytest.mark.parametrize("limit", [COARSE, 4 * COARSE])
def test_numbers_of_one_kind_are_no_order_of_each_other(limit: float) -> None:
    """Although, sorted, they differ by no more than rounding."""
    one, other = drawn_wide(0, (200, 200)), drawn_wide(1, (200, 200))
    apart = (one.flatten().sort()[0] - other.flatten().sort()[0]).norm() / other.norm()
    assert apart < COARSE
    assert not is_reordered(one, other, limit)


@pytest.mark.parametrize("noise", [2.0, 8.0, 32.0])
def test_noise_is_no_order(noise: float) -> None:
    assert not is_reordered(drawn_wide(0) + noise * COARSE * drawn_wide(1), drawn_wide(0), COARSE)


def test_a_row_in_place_of_another_is_no_order() -> None:
    one = drawn_wide(0)
    one[3] = one[5]
    assert not is_reordered(one, drawn_wide(0), COARSE)
    one[3] = 0
    assert not is_reordered(one, drawn_wide(0), COARSE)


def test_what_is_right_or_nothing_is_no_order() -> None:
    for one, other in (
        (drawn_wide(0), drawn_wide(0)),
        (drawn_wide(0), torch.zeros(SHAPE)),
        (torch.zeros(SHAPE), drawn_wide(0)),
    ):
        assert not is_reordered(one, other, COARSE)
    assert not is_reordered(drawn_wide(0).T, drawn_wide(0), COARSE)


WHOLE = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)) * 1e-2


@pytest.mark.parametrize(("observed", "name"), [(WHOLE.bfloat16().float(), "bf16"), (WHOLE.half().float(), "fp16")])
def test_a_narrower_type_is_told(observed: Tensor, name: str) -> None:
    assert find_rounding(observed, WHOLE) == name


@pytest.mark.parametrize(
    "observed",
    [
        WHOLE,
        WHOLE * 1.001,
        WHOLE + 1e-5 * torch.randn(WHOLE.shape, generator=torch.Generator().manual_seed(1)),
        torch.where(WHOLE > 0, WHOLE, 0.0),
        WHOLE.flip(0).half().float(),  # rounded, and more than that
        WHOLE.clamp(-1e-3, 1e-3),
        (WHOLE * 300).half().float() / 300,
    ],
    ids=["same", "scaled", "noise", "half of it", "another", "clamped", "scale"],
)
def test_other_changes_are_no_rounding(observed: Tensor) -> None:
    assert not find_rounding(observed, WHOLE)


def test_a_few_coarse_numbers_that_a_narrower_type_holds_by_chance_are_not_rounded() -> None:
    """Sums of bf16 have few digits: all of 16 may be in a narrower type, and one that is expected may not."""
    observed = torch.arange(16.0) + 16.25
    expected = observed + torch.tensor([2.0**-9, *[0.0] * 15])
    assert not find_rounding(observed, expected)
    assert find_rounding(observed, expected + 2.0**-9) == "bf16"


def test_fp32_is_a_narrower_type_of_fp64_alone() -> None:
    whole = WHOLE.double() / 3
    assert find_rounding(whole.float().double(), whole) == "fp32"
    assert not find_rounding(whole.float().double() * (1 + 1e-12), whole)
    observed, expected = sketch(whole.float().double()), sketch(whole)
    assert is_rounded_sketch(observed, expected)
    assert not sketch(WHOLE).narrow


def test_one_value_that_is_there_often_is_no_rounding() -> None:
    """As of a norm's weights, all of which were ones, and had something added."""
    assert not find_rounding(torch.full((64,), 1.1), torch.ones(64))
