"""What proves that a step had a step before's weights: all of it, bit for bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeproof.core.measured import Compared, Measured
from pipeproof.core.old_weights import Given, OldWeights, find_old_weights
from pipeproof.core.verdict import Mismatch, Verdict

ONE, DUE = torch.tensor([2.0]), torch.tensor([1.0])
NEAR = torch.tensor([2.0 + 2**-22])


def step(given: Given | None, **more: Any) -> Any:
    """A step of stages 0 and 1 whose gradients and losses are twice what they should be."""
    losses = (
        Compared("loss", 3, "fail", microbatch=0, observed=3.0, expected=1.0),
        Compared("loss", 3, "fail", observed=4.0, expected=1.0),
    )
    verdict = Verdict("c", "fail", "none", (), (Mismatch("loss", 3),), measured=Measured(losses))
    observed = {
        "verdict": verdict,
        "placement": (0, 1),
        "operation": "train",
        "gradients": {(0, "a"): ONE, (1, "b"): ONE},
        "expected": SimpleNamespace(gradients={(0, "a"): DUE, (1, "b"): DUE}),
        "right": SimpleNamespace(weights={"a": DUE, "b": DUE}),
        "earlier_weights": [{"a": DUE, "b": DUE}, {"a": DUE, "b": ONE}],
        "with_weights": lambda weights: given if {*weights} == {"b"} else None,
    }
    return SimpleNamespace(**observed | more)


@pytest.mark.parametrize(
    ("given", "exact"),
    [
        (Given((3.0,), 4.0, {"a": ONE, "b": ONE}), True),
        (Given((3.0,), 4.0, {"a": ONE, "b": NEAR}), False),
        (Given((3.0,), 4.0 + 2**-40, {"a": ONE, "b": ONE}), False),
        (Given((3.0,), 4.0, {"a": ONE, "b": DUE}), None),
        (Given((3.0,), 4.0, {"a": ONE}), None),
        (Given((3.0,), 5.0, {"a": ONE, "b": ONE}), None),
        (None, None),
    ],
)
def test_every_gradient_and_every_loss_counts(given: Given | None, exact: bool | None) -> None:
    wanted = None if exact is None else OldWeights((0, 1), 1, exact)
    assert find_old_weights(step(given)) == wanted


def test_a_loss_that_agrees_clears_all_weights() -> None:
    given = Given((3.0,), 4.0, {"a": ONE, "b": ONE})
    right = Measured((Compared("loss", 3, "pass", microbatch=0, observed=3.0, expected=3.0),))
    verdict = Verdict("c", "fail", "none", (), (Mismatch("loss", 3),), measured=right)
    assert find_old_weights(step(given, verdict=verdict)) is None
    assert find_old_weights(step(given, right=None)) is None
