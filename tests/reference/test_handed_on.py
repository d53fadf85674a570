"""What a stage hands on is the part of a gradient that flows through it."""

import torch
from torch import Tensor

from pipeproof.reference.handed_on import AutogradGraph, Cut


def graph_of(**tensors: Tensor) -> AutogradGraph:
    graph = AutogradGraph()
    for place, tensor in tensors.items():
        graph.note(place, tensor)
    return graph


def leaf(value: float) -> Tensor:
    return torch.tensor(value, requires_grad=True)


def test_what_flows_through_a_tensor_that_comes_in_beside_it_is_not_handed_on_with_it() -> None:
    x = leaf(2.0) * 1
    total = x * 3
    made = x * 5 + total * 7
    graph = graph_of(x=x, total=total, made=made)
    assert torch.autograd.grad(made, x, retain_graph=True) == (26.0,)
    assert graph.hand_on(made * 1, Cut(frozenset({"x", "total"}), frozenset({"made"}))) == {"x": 5.0, "total": 7.0}


def test_what_flows_past_a_stage_is_not_handed_on_by_it() -> None:
    x = leaf(2.0) * 1
    first = x * 3
    second = x * 5 + first * 7
    graph = graph_of(x=x, first=first, second=second)
    assert graph.hand_on(second * 1, Cut(frozenset({"x"}), frozenset({"first"}))) == {"x": 21.0}
    assert graph.hand_on(second * 1, Cut(frozenset({"x", "first"}), frozenset({"second"}))) == {
        "x": 5.0,
        "first": 7.0,
    }


def test_what_is_given_on_as_it_is_has_the_gradient_of_both() -> None:
    x = leaf(2.0) * 1
    first = x * 3
    graph = graph_of(x=x, first=first, last=x * 5 + first * 7)
    objective = x * 5 + first * 7
    assert graph.hand_on(objective, Cut(frozenset({"x"}), frozenset({"x", "first"}))) == {"x": 26.0}


def test_of_what_has_no_place_nothing_is_known() -> None:
    x = leaf(2.0) * 1
    graph = graph_of(x=x)
    assert graph.hand_on(x * 2, Cut(frozenset({"x", "other"}), frozenset({"nowhere"}))) == {"x": None}


def test_gradients_are_whole_again_afterwards() -> None:
    x = leaf(2.0) * 1
    made = x * 3
    graph = graph_of(x=x, made=made)
    graph.hand_on(made * 1, Cut(frozenset({"x"}), frozenset({"made"})))
    assert torch.autograd.grad(made, x) == (3.0,)
