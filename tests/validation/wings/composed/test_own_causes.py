"""What is wrong with gradients of stages that are held against themselves has a name, whatever gradients are like."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.verdict import Verdict
from pipeproof.records.step_check import check_step
from pipeproof.wings.composed import Composed
from tests.support.pipeline_here import MSE, Job, layers

DATA = [(torch.arange(12).reshape(3, 4) % (m + 2), torch.full((3, 4, 8), m / 4)) for m in range(3)]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.words(tokens)
        return found


def verdict_after(change: Callable[[list[dict[str, nn.Parameter]]], None]) -> Verdict:
    torch.manual_seed(0)
    stages = [Words(), *layers(torch.tanh, torch.sin)]
    with check_step(dict(enumerate(stages)), DATA, against=Composed(MSE), rename="{}.{}".format) as check:
        Job(stages, DATA).step()
        change([dict(stage.named_parameters()) for stage in stages])
        check.gradients()
    return check.verdict


@pytest.mark.parametrize("factor", [2.0, 0.25])
def test_a_sparse_gradient_that_is_a_multiple_is_named(factor: float) -> None:
    def change(own: list[dict[str, nn.Parameter]]) -> None:
        words = own[0]["words.weight"]
        assert words.grad is not None
        words.grad = words.grad * factor

    (cause,) = verdict_after(change).cause
    assert (cause.kind, cause.stage, cause.factor) == ("scale", 0, pytest.approx(factor))


def exchanged(own: list[dict[str, nn.Parameter]], *names: str) -> None:
    for name in names:
        one, other = own[1][name], own[2][name]
        one.grad, other.grad = other.grad, one.grad


@pytest.mark.parametrize("names", [["layer.weight"], ["layer.weight", "layer.bias"]])
def test_gradients_of_two_stages_that_were_exchanged_are_found_and_have_no_name(names: list[str]) -> None:
    verdict = verdict_after(lambda own: exchanged(own, *names))
    places = {(one.law, one.stage, one.parameter) for one in verdict.mismatches}
    assert places == {("gradient", stage, f"{stage}.{name}") for stage in (1, 2) for name in names}, str(verdict)
    assert not verdict.cause, str(verdict)
