"""A stage that gives what it is given, as with weights that begin at zero, beside a tensor that goes past it."""

import pytest
import torch
from torch import Tensor, nn

from pipeproof.judging.verdict import Verdict
from tests.support.pipeline_here import Job, Layer, checked, layers


class Zeroed(nn.Module):
    """Adds nothing yet."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.more


def twice_the_first(x: Tensor, other: Tensor) -> Tensor:
    return 2 * torch.tanh(x) + other


def verdict_of(first: int, *, equal: bool = False, **job: float) -> Verdict:
    """Of a step whose third stage is called on what the second made and what it was given, ``first`` that of a stage.

    ``equal``: both get the same gradient.
    """
    last = Layer(torch.add if equal else twice_the_first)
    last.layer = nn.Identity()  # type: ignore[assignment]
    stages = [*layers(torch.tanh), Zeroed(), last]
    return checked(Job(stages, route={2: [(first, 0), (1 - first, 0)]}, **job))  # type: ignore[arg-type]


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("apart", [{}, {0: 1}], ids=["together", "apart"])
@pytest.mark.parametrize("first", [0, 1])
def test_equal_tensors_are_told_apart_by_what_flows_back(first: int, apart: dict[int, int], equal: bool) -> None:
    verdict = verdict_of(first, equal=equal, apart=apart)  # type: ignore[arg-type]
    assert verdict.verdict == "pass", str(verdict)


def test_where_no_way_fits_what_flowed_back_is_wrong() -> None:
    assert verdict_of(1, keep=0.5).verdict == "fail"
