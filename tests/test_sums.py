"""Coefficients of microbatches' contributions in words."""

import pytest
import torch

from pipeline.action import Action, Kind
from validation.diagnosis.sums import Broken, broken_additions, counted
from validation.recording import Addition


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


def test_the_halves_of_a_backward_add_what_rounding_lets_them() -> None:
    draw = torch.Generator().manual_seed(0)
    parts = [{(0, name): torch.randn(30, generator=draw) for name in ("one", "two")} for _ in range(3)]
    additions, sums = [], {name: torch.zeros(30) for name in ("one", "two")}
    for m, part in enumerate(parts):
        additions.append(Addition(Action(0, Kind.BACKWARD_INPUT, m), None, dict(sums)))
        factor = 2.0 if m == 1 else 1.0
        sums = {"one": sums["one"] + factor * part[0, "one"], "two": sums["two"] + part[0, "two"]}
        additions.append(Addition(Action(0, Kind.BACKWARD_WEIGHT, m), None, dict(sums)))
    found = broken_additions(0, additions, parts)
    assert found == [Broken("scale", 0, (1,), parameters=("one",), factor=2.0, detail="2 times the expected")]
