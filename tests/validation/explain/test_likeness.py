"""What a tensor is in place of the expected one: said where its content tells it, and left open where it does not."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pipeproof.core.observe.likeness import Label, Likeness
from pipeproof.core.observe.recording import GIVEN, Point
from pipeproof.core.tolerance import error
from pipeproof.explain.known import Alike
from pipeproof.explain.likeness import likeness
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
