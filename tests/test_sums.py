"""Coefficients of microbatches' contributions in words."""

import pytest

from validation.diagnosis.sums import counted


@pytest.mark.parametrize(
    ("coefficients", "repeated", "kinds"),
    [
        ([1.0, 1.0, 1.0, 1.0], (), []),
        ([1.0, 0.0, 1.0, 1.0], (), [("dropped", (1,))]),
        ([1.0, 2.0, 1.0, 1.0], (), [("doubled", (1,))]),
        ([1.0, 3.0, 1.0, 1.0], (), [("doubled", (1,))]),
        ([1.0, 4.0, 4.0, 1.0], (), [("scale", (1, 2))]),  # not divided by the number of microbatches
        ([1.0, 4.0, 1.0, 1.0], (1,), [("doubled", (1,))]),  # seen to run four times
        ([1.0, 2.0], (), [("doubled", (1,))]),
        ([0.25, 0.25, 0.25, 0.25], (), [("scale", ())]),
        ([-1.0, -1.0, -1.0, -1.0], (), [("sign", ())]),
        ([0.0, 2.0, 1.0, 1.0], (), [("dropped", (0,)), ("doubled", (1,))]),
        ([0.5, 1.5, 1.0, 1.0], (), [("unequal-weights", (0, 1))]),
    ],
)
def test_coefficients_are_told(
    coefficients: list[float], repeated: tuple[int, ...], kinds: list[tuple[str, tuple[int, ...]]]
) -> None:
    found = counted(3, coefficients, repeated=repeated)
    assert [(one.kind, one.microbatches) for one in found] == kinds
    assert all(one.stage == 3 for one in found)
