"""What the reference computes, module or not: of anything else it is known that it lacks it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from validation.foreign.survey import Computed
from validation.observers.sketch import sketch

GIVEN = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def computed(function: Callable[[Tensor], Tensor]) -> Computed:
    with Computed() as found:
        function(GIVEN)
    return found


@pytest.mark.parametrize(
    ("seen", "lacks"),
    [
        (GIVEN.exp(), False),
        (GIVEN.exp() * (1 + 1e-6), False),
        (GIVEN.exp() * 3, False),
        (GIVEN.exp().bfloat16().float(), False),
        (GIVEN.exp().flip(0), False),
        (GIVEN.exp()[:2], False),
        (GIVEN.exp().double(), False),
        (GIVEN.sin(), True),
        (GIVEN.exp() + 0.1, True),
    ],
)
def test_what_is_no_step_of_a_computation_nor_a_change_of_one_is_lacking(seen: Tensor, lacks: bool) -> None:
    assert computed(lambda x: (x.exp() + 1).log()).lacks(sketch(seen)) == lacks


def test_where_random_numbers_are_drawn_nothing_is_known() -> None:
    assert not computed(lambda x: nn.functional.dropout(x.exp())).lacks(sketch(GIVEN.sin()))
