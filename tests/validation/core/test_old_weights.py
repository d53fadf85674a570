"""What proves that a step had a step before's weights: all of it, bit for bit."""

from typing import Any

import pytest
import torch

from pipeproof.core.measured import Compared, Measured
from pipeproof.core.old_weights import Given, OldWeights, find_old_weights
from pipeproof.core.verdict import Mismatch, Verdict

ONE, DUE = torch.tensor([2.0]), torch.tensor([1.0])
NEAR = torch.tensor([2.0 + 2**-22])
TWICE = Given((3.0,), 4.0, {"a": ONE, "b": ONE})


def found(given: Given | None, *, observed: float = 3.0, **more: Any) -> OldWeights | None:
    """Of a step of stages 0 and 1 whose gradients and losses are twice what they should be."""
    losses = (
        Compared("loss", 3, "fail", microbatch=0, observed=observed, expected=1.0),
        Compared("loss", 3, "fail", observed=4.0, expected=1.0),
        Compared("loss", 2, "pass", observed=1.0, expected=1.0),
    )
    verdict = Verdict("c", "fail", "none", (), (Mismatch("loss", 3),), measured=Measured(losses))
    given_of = {
        "expected": {"a": DUE, "b": DUE},
        "known": {"a": DUE, "b": DUE},
        "earlier": [{"a": DUE, "b": DUE}, {"a": DUE, "b": ONE}],
        "play": lambda weights: given if {*weights} == {"b"} else None,
    }
    return find_old_weights(verdict, {(0, "a"): ONE, (1, "b"): ONE}, placement=(0, 1), **given_of | more)


@pytest.mark.parametrize(
    ("given", "more", "exact"),
    [
        (TWICE, {}, True),
        (Given((3.0,), 4.0, {"a": ONE, "b": NEAR}), {}, False),
        (Given((3.0,), 4.0 + 2**-40, {"a": ONE, "b": ONE}), {}, False),
        (Given((3.0,), 4.0, {"a": ONE, "b": DUE}), {}, None),
        (Given((3.0,), 4.0, {"a": ONE}), {}, None),
        (Given((3.0,), 5.0, {"a": ONE, "b": ONE}), {}, None),
        (None, {}, None),
        (Given((1.0,), 4.0, TWICE.gradients), {"observed": 1.0}, None),  # a loss that agrees clears all weights
        (Given((3.0,), 4.0, {"a": DUE, "b": DUE}), {"expected": {}}, True),  # gradients of no expected sum
        (TWICE, {"earlier": [{"a": DUE, "b": DUE}] * 2}, None),
        (TWICE, {"expected": {"a": ONE, "b": DUE}}, True),  # one gradient may agree
    ],
)
def test_every_gradient_and_every_loss_counts(given: Given | None, more: dict[str, Any], exact: bool | None) -> None:
    assert found(given, **more) == (None if exact is None else OldWeights((0, 1), 1, exact))
