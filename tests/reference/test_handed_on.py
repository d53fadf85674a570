"""What a stage hands on is the part of a gradient that flows through it."""

import torch
from torch import Tensor

from pipeproof.reference.handed_on import AutogradGraph, Cut


def handed_on(made: Tensor, cut: tuple[set[str], set[str]], /, **tensors: Tensor) -> dict[str, float | None]:
    """What of the gradient of ``made`` a stage hands on, whose tensors come in and go out at the places of ``cut``."""
    graph = AutogradGraph()
    for place, tensor in tensors.items():
        graph.note(place, tensor)
    return graph.hand_on(made, Cut(*map(frozenset, cut)))  # type: ignore[return-value]


def entering() -> Tensor:
    return torch.tensor(2.0, requires_grad=True) * 1


def test_what_flows_through_a_tensor_that_comes_in_beside_it_is_not_handed_on_with_it() -> None:
    x = entering()
    total = x * 3
    made = x * 5 + total * 7
    assert torch.autograd.grad(made, x, retain_graph=True) == (26.0,)
    found = handed_on(made * 1, ({"x", "total"}, {"made"}), x=x, total=total, made=made)
    assert found == {"x": 5.0, "total": 7.0}


def test_what_flows_past_a_stage_is_not_handed_on_by_it() -> None:
    x = entering()
    first = x * 3
    second = x * 5 + first * 7
    places = {"x": x, "first": first, "second": second}
    assert handed_on(second * 1, ({"x"}, {"first"}), **places) == {"x": 21.0}
    assert handed_on(second * 1, ({"x", "first"}, {"second"}), **places) == {"x": 5.0, "first": 7.0}


def test_what_is_given_on_as_it_is_has_the_gradient_of_both() -> None:
    x = entering()
    first = x * 3
    last, objective = (x * 5 + first * 7 for _ in range(2))
    assert handed_on(objective, ({"x"}, {"x", "first"}), x=x, first=first, last=last) == {"x": 26.0}


def test_of_what_has_no_place_nothing_is_known() -> None:
    x = entering()
    assert handed_on(x * 2, ({"x", "other"}, {"nowhere"}), x=x) == {"x": None}


def test_gradients_are_whole_again_afterwards() -> None:
    x = entering()
    made = x * 3
    handed_on(made * 1, ({"x"}, {"made"}), x=x, made=made)
    assert torch.autograd.grad(made, x) == (3.0,)
