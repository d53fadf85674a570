"""A factor is the loss scale, or it is not."""

import pytest

from pipeproof.diagnosis.loss_scale import LossScale, is_factor


@pytest.mark.parametrize(
    ("factor", "due", "same"),
    [
        (1024.0, 1024.0, True),
        (1024.5, 1024.0, True),  # coarse types round
        (1026.0, 1024.0, False),
        (512.0, 1024.0, False),
        (-1024.0, 1024.0, False),
        (None, 1024.0, False),
        (1.0, 1.0, False),  # where nothing is scaled, nothing was forgotten
    ],
)
def test_a_factor_is_the_due_one_or_not(factor: float | None, due: float, same: bool) -> None:
    assert is_factor(factor, due) is same


def test_what_is_left_where_gradients_are_divided_by_another_scale() -> None:
    assert LossScale(1024.0, 2048.0, 2048.0).over == 0.5
