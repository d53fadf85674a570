"""What a step may hand back, and the sentences for everything else."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pipeproof.pipeline.action import Action
from pipeproof.pipeline.costs import trace_of
from pipeproof.pipeline.schedules import build
from pipeproof.pipeline.timeline import simulate
from pipeproof.whitebox.handed_back import HandBackError, Operation, StepResult, through_operations, understood


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
        (StepResult([], loss_scale=0.0), "step returned 0.0 as loss_scale: expected a number above 0"),
        (StepResult([], loss_scale="x"), "step returned 'x' as loss_scale: expected a number above 0"),  # type: ignore[arg-type]
        ((), "step returned a tuple of 0"),
        ((one for one in ()), "step yields, but is one step: pass operations=, the list that it goes through"),
        (StepResult([], outputs=[1]), "step returned a list as outputs: expected a mapping"),
        (StepResult([], outputs={"a": ["x"]}), "step returned a list as the output 'a': expected a list with a tensor"),
        (([], 1, 2, 3, 4), "step returned a tuple of 5"),
        (
            ({"w": (torch.ones(2), 3)}, None),
            "step returned a mapping with 'w': a tuple: expected the name",
        ),
    ],
)
def test_what_is_not_understood_is_said(result: Any, sentence: str) -> None:
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
    assert understood(StepResult([]), "step").by_microbatch == ()


def test_a_trace_may_be_names_of_actions() -> None:
    trace = trace_of(simulate(build("gpipe", ranks=2, microbatches=2)))
    computed = [str(action) for action in StepResult([], trace=trace).actions(1) or () if "RECV" not in str(action)]
    assert computed[:2] == ["1F0", "1F1"]
    assert StepResult([], trace=["0F1"]).actions(0) == (Action.parse("0F1"),)
    assert StepResult([], trace=[Action.parse("0F1")]).actions(0) == (Action.parse("0F1"),)
    assert StepResult([]).actions(0) is None


def test_modules_and_gradients_go_together() -> None:
    """A mapping beside modules: by name where one of them has it, by the parameter itself anywhere."""
    one, two = nn.Linear(2, 2), nn.Linear(2, 3)
    made = torch.ones(2, 2)
    handed = understood(StepResult(one, gradients={"weight": made}), "step")
    assert handed.modules == [one]
    assert handed.by_parameter == {id(one.weight): made}
    both = understood(StepResult([one, two], gradients={one.weight: made, two.weight: None}), "step")
    assert both.by_parameter == {id(one.weight): made, id(two.weight): None}
    assert understood(StepResult([one]), "step").by_parameter is None, "they are in .grad"
    assert understood({"weight": made}, "step").by_parameter is None, "there is no module that has them"


def test_one_weight_under_two_names_is_one() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    handed = understood(StepResult(module, gradients={"b.weight": None}), "step")
    assert handed.by_parameter == {id(module["a"].weight): None}


@pytest.mark.parametrize(
    ("modules", "gradients", "sentence"),
    [
        ([nn.Linear(2, 2), nn.Linear(2, 2)], {"weight": None}, "'weight', which 2 of the modules have: key them by"),
        ([nn.Linear(2, 2)], {"w": None}, "of 'w', which no module that is handed back has: key them by the parameters"),
        (
            [nn.Linear(2, 2)],
            {nn.Parameter(torch.ones(2)): None},
            "of a parameter, which no module that is handed back has",
        ),
        ([nn.Linear(2, 2)], [None], "step returned a list as gradients: expected a mapping"),
        ([], {nn.Parameter(torch.ones(2)): None}, "expected the name of a parameter"),
        ({"w": None}, {"w": None}, "step returned a dict: expected its local modules"),
    ],
)
def test_gradients_that_go_with_no_module_are_said(modules: Any, gradients: Any, sentence: str) -> None:
    with pytest.raises(HandBackError, match=sentence):
        _ = understood(StepResult(modules, gradients=gradients), "step").by_parameter


WANTED = [Operation("train", [1]), Operation("eval", [2])]
Operations = Iterator[Operation]


def through(step: Callable[[Operations], Any]) -> tuple[list[object], list[int]]:
    """What was handed back, and the operations that began."""
    begun: list[int] = []
    return list(through_operations(step, WANTED, begun.append, step="step")), begun


def test_each_operation_begins_when_it_is_asked_for() -> None:
    order: list[Any] = []

    def step(operations: Operations) -> Iterator[Any]:
        order.append("set up")
        for operation, microbatches in operations:
            order.append((operation, microbatches))
            yield operation
        order.append("after")

    assert through(step) == (["train", "eval"], [0, 1])
    assert order == ["set up", ("train", [1]), ("eval", [2]), "after"]


def returned(operations: Operations) -> Any:
    return "modules", "losses"


def all_at_once(operations: Operations) -> Iterator[Any]:
    yield from list(operations)


def too_few(operations: Operations) -> Iterator[Any]:
    for operation, _ in operations:
        yield operation
        return


def too_many(operations: Operations) -> Iterator[Any]:
    for operation, _ in operations:
        yield operation
        yield operation


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (returned, "step returned a tuple; with operations= it yields what it made of each"),
        (all_at_once, "step asked for another operation before it handed back operation 1: it yields"),
        (too_few, "step handed back 1 of 2 operations"),
        (too_many, "step handed back more than its operations"),
    ],
)
def test_what_goes_through_operations_otherwise_is_said(step: Callable[[Operations], Any], sentence: str) -> None:
    with pytest.raises(HandBackError, match=sentence):
        through(step)
