"""What has tensors in it is told by its type, however a class of a user's own keeps them."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pipeproof.observers.hidden import hidden_in

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


@pytest.mark.parametrize("made", [Output(h=HIDDEN), Several([HIDDEN]), Other(h=HIDDEN), Plain(HIDDEN), Slotted(HIDDEN)])
def test_its_type_is_told(made: object) -> None:
    assert hidden_in((3, [made])) == type(made).__name__


@pytest.mark.parametrize("made", [Private(HIDDEN), Plain([Slotted({"h": HIDDEN})]), Other(h=Plain(HIDDEN))])
def test_it_is_told_of_what_is_deep_in_it(made: object) -> None:
    assert hidden_in(made) == type(made).__name__


def test_one_that_has_itself_in_it_is_looked_at_once() -> None:
    made = Plain(None)
    made.hidden = [made, "x"]
    assert not hidden_in(made)


@pytest.mark.parametrize(
    "made", [HIDDEN, {"h": [HIDDEN]}, Output(h=torch.ones(2)), Slotted("x"), torch.nn.Linear(2, 2), None]
)
def test_what_is_seen_or_wants_no_gradient_is_not_hidden(made: object) -> None:
    assert not hidden_in((3, [made]))
