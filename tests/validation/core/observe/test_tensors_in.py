"""What has tensors in it is told by its type, however a class of a user's own keeps them."""

from collections import ChainMap, OrderedDict, UserDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.observe.tensors_in import hidden_in, hidden_inputs, inputs_kept

HIDDEN = torch.ones(2, requires_grad=True)


class Output(OrderedDict[str, Any]):
    pass


class Several(list[Any]):
    pass


class Other(UserDict[str, Any]):
    pass


@dataclass
class Plain:
    hidden: Any


@dataclass(slots=True)
class Slotted:
    hidden: Any


class Private:
    __slots__ = ("__hidden",)

    def __init__(self, hidden: Any) -> None:
        self.__hidden = hidden

    def get(self) -> Any:
        return self.__hidden


def later() -> Any:
    hidden = HIDDEN * 2
    return lambda: hidden


def nested() -> Tensor:
    return torch.nested.as_nested_tensor([HIDDEN, HIDDEN * 2], layout=torch.jagged)


HIDING: list[tuple[object, str]] = [
    *((made, type(made).__name__) for made in (Output(h=HIDDEN), Several([HIDDEN]), Other(h=HIDDEN), Plain(HIDDEN))),
    *((made, type(made).__name__) for made in (Slotted(HIDDEN), Private(HIDDEN), Plain([Slotted({"h": HIDDEN})]))),
    (Other(h=Plain(HIDDEN)), "Other"),
    (later(), "function"),
    (Private(HIDDEN).get, "method"),
    (partial(torch.sum, HIDDEN), "partial"),
    ((one for one in (HIDDEN,)), "generator"),
    (zip([HIDDEN], [1], strict=True), "zip"),
    (map(torch.sum, [HIDDEN]), "map"),
    (ChainMap({"h": HIDDEN}), "ChainMap"),
    (HIDDEN.sum, "builtin_function_or_method"),
    (nested(), "a nested Tensor"),
    (torch.eye(2).to_sparse().requires_grad_(), "a sparse Tensor"),
]
OPEN: list[object] = [
    HIDDEN,
    {"h": [HIDDEN]},
    Output(h=torch.ones(2)),
    Slotted("x"),
    torch.nn.Linear(2, 2),
    torch.nn.Linear(2, 2).forward,
    later,
    zip([torch.ones(2)], [1], strict=True),
    lambda: HIDDEN,  # a global
    torch,
    None,
]  # what is seen, or wants no gradient


@pytest.mark.parametrize(("made", "told"), [*HIDING, *((one, "") for one in OPEN)])
def test_what_hides_tensors_is_told_by_its_type(made: object, told: str) -> None:
    assert hidden_in((3, [made])) == told


def test_an_iterator_gives_all_that_it_has_afterwards() -> None:
    made = iter([HIDDEN, HIDDEN * 2])
    assert hidden_in(made) == "list_iterator"
    assert len([*made]) == 2


def test_one_that_has_itself_in_it_is_looked_at_once() -> None:
    made = Plain(None)
    made.hidden = [made, "x"]
    assert not hidden_in(made)


class Told(nn.Module):
    """Has its input in an attribute, as Megatron's models have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.given = nn.LSTM(2, 2), list[Tensor]()

    def forward(self) -> Tensor:
        return self.given[0]


class Keeping(nn.Module):
    """Keeps what it is given, and what it makes of that."""

    def __init__(self) -> None:
        super().__init__()
        self.told = nn.ModuleList([nn.Linear(2, 2)])
        self.given = self.made = HIDDEN

    def forward(self, x: Tensor) -> Tensor:
        self.given, self.made = x, x * 2
        return self.made


def test_an_input_that_is_no_argument_is_told_by_its_attribute() -> None:
    stage = nn.Sequential(Told())
    assert not inputs_kept(stage)
    stage[0].given = [HIDDEN]
    assert hidden_inputs(inputs_kept(stage), [torch.ones(2, requires_grad=True)]) == "0.given"


def test_what_a_module_keeps_of_what_it_was_given_is_no_other_input() -> None:
    stage, given = Keeping(), torch.ones(2, requires_grad=True)
    stage(HIDDEN)
    kept = inputs_kept(stage)
    assert [path for _, _, path in kept] == ["given"]
    stage(given)
    assert not hidden_inputs(kept, [given])
