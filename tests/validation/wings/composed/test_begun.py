"""A module whose calls say nothing of its microbatches is refused in a sentence."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import Composed, check_step
from pipeproof.core.reason import Reason
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, MSE, layers


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.inner(x))


def test_a_module_whose_calls_nobody_sees_is_refused() -> None:
    inner = layers(torch.tanh)[0]
    with check_step(inner, DATA, against=Composed(MSE)) as check:
        for x, target in DATA:
            (MSE(inner.forward(x), target) / 3).backward()
        check.gradients()
    golden(str(check.verdict).splitlines()[0])


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (
            "in place",
            "its compile() hides them; compile the modules in it, or pass and call what torch.compile returns",
        ),
        ("beside", "of a compiled one, that is what torch.compile returned"),
        ("blocks", "PASS"),
        ("returned", "PASS"),
    ],
)
def test_of_a_compiled_module_it_is_said_what_to_pass(how: str, sentence: str) -> None:
    given = called = nn.Sequential(*layers(torch.tanh))
    if how == "in place":
        given.compile(backend="eager")
    elif how == "blocks":
        for block in given:
            block.compile(backend="eager")
    else:
        called = torch.compile(given, backend="eager")  # type: ignore[assignment]  # it is a module, too
        given = called if how == "returned" else given
    with check_step(given, DATA, against=Composed(MSE)) as check:
        for x, target in DATA:
            (MSE(called(x), target) / 3).backward()
        check.gradients()
    assert sentence in str(check.verdict), str(check.verdict)


def test_a_module_that_is_called_on_what_it_gave_is_refused() -> None:
    inner = layers(torch.tanh)[0]
    with check_step(inner, DATA, against=Composed(MSE)) as check:
        for x, target in DATA:
            (MSE(Around(inner)(x), target) / 3).backward()
        check.gradients()
    assert check.verdict.law("comparable").reasons == (Reason.CALLS,), str(check.verdict)
    golden(check.verdict.law("comparable").note)


def test_a_module_that_is_called_on_several_inputs_is_refused() -> None:
    inner = layers(torch.tanh)[0]
    data = [((x, x + 1), target) for x, target in DATA]
    with check_step(inner, data, against=Composed(MSE)) as check:
        for (x, other), target in data:
            (MSE(inner(x) * inner(other), target) / 3).backward()
        check.gradients()
    assert check.verdict.law("comparable").reasons == (Reason.CALLS,), str(check.verdict)
    golden(check.verdict.law("comparable").note)


@pytest.mark.parametrize("trained", [True, False])
def test_a_stage_that_ran_without_gradients_is_unknown_unless_it_is_frozen(trained: bool) -> None:
    first, last = layers(torch.tanh, torch.sin)
    first.requires_grad_(trained)
    with check_step({0: first, 1: last}, DATA, against=Composed(MSE), rename="{}.{}".format) as check:
        for x, target in DATA:
            with torch.no_grad():
                sent = first(x)
            (MSE(last(sent), target) / 3).backward()
        check.gradients()
    assert check.verdict.verdict == ("unknown" if trained else "pass"), str(check.verdict)
    assert ("call requires_grad_(False)" in str(check.verdict)) == trained
