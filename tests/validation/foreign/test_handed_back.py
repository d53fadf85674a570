"""What a step may hand back, and the sentences for everything else."""

from typing import Any

import pytest
import torch
from torch import nn

from pipeline.action import Action
from pipeline.costs import trace_of
from pipeline.schedules import build
from pipeline.simulate import simulate
from validation.foreign.handed_back import HandBackError, HandedBack, understood


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (None, "step returned None: expected its local modules"),
        (7, "step returned 7: expected its local modules"),
        ("x", "step returned 'x': expected its local modules"),
        ([3], "step returned 3 among its modules"),
        (({"w": 1}, None), "step returned a mapping with 'w': 1"),
        (([], "x"), "step returned 'x' as losses"),
        (([], ["x"]), "step returned a list as losses"),
        (([], torch.ones(2, 2)), "step returned a Tensor as losses"),
        (([], None, "x"), "step returned 'x' as the gradient norm"),
        (([], None, None, ["0X1"]), "step returned a trace that cannot be read: '0X1' is not an action"),
        (([], None, None, 3), "step returned a trace that cannot be read"),
        ((), "step returned a tuple of 0"),
        (([], 1, 2, 3, 4), "step returned a tuple of 5"),
        (
            ({"w": (torch.ones(2), 3)}, None),
            "step returned a mapping with 'w': a tuple: expected the name",
        ),
    ],
)
def test_what_is_not_understood_is_said_in_a_sentence(result: Any, sentence: str) -> None:
    with pytest.raises(HandBackError) as caught:
        understood(result, "step")
    assert str(caught.value).startswith(sentence)


def test_every_form_that_is_understood() -> None:
    module, gradients = nn.Linear(2, 2), {"w": torch.ones(2), "b": None}
    assert understood(module, "step").modules == [module]
    assert understood([module, module], "step").modules == [module, module]
    assert understood(nn.ModuleDict({"a": module}), "step").gradients is None, "a module, not a mapping"
    assert understood(gradients, "step").gradients == gradients
    handed = understood((module, [torch.tensor(1.0), 2], torch.tensor(3.0)), "step")
    assert (handed.by_microbatch, handed.whole_loss, handed.norm) == ((1.0, 2.0), None, 3.0)
    assert understood((module, torch.tensor([1.0, 2.0])), "step").by_microbatch == (1.0, 2.0)
    assert understood((module, 1.5), "step").whole_loss == 1.5
    assert understood(HandedBack([]), "step").by_microbatch == ()


def test_a_trace_is_a_trace_or_names_of_actions() -> None:
    trace = trace_of(simulate(build("gpipe", ranks=2, microbatches=2)))
    computed = [str(action) for action in HandedBack([], trace=trace).actions(1) or () if "RECV" not in str(action)]
    assert computed[:2] == ["1F0", "1F1"]
    assert HandedBack([], trace=["0F1"]).actions(0) == (Action.parse("0F1"),)
    assert HandedBack([], trace=[Action.parse("0F1")]).actions(0) == (Action.parse("0F1"),)
    assert HandedBack([]).actions(0) is None
