"""Where a stage ends in autograd's graph, told by the parameters that went into each tensor."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipeproof.reference.graph import NONE, depths, ends_of, frontier, hook_first
from tests.support.pipeline_here import Job, checked, layers

FIRST, SECOND = (torch.ones(2, requires_grad=True) for _ in range(2))
STAGE_OF = {id(FIRST): 0, id(SECOND): 1}


def test_depths_are_the_last_stage_that_went_in() -> None:
    boundary = torch.ones(2) * FIRST
    output = (boundary + 1) * SECOND
    deep = depths(ends_of([output]), STAGE_OF)
    assert deep[output.grad_fn] == 1
    assert deep[boundary.grad_fn] == 0
    assert depths(ends_of([output]), {})[output.grad_fn] == NONE


def test_the_frontier_is_the_last_known_tensor_of_a_stage() -> None:
    early = torch.ones(2) * FIRST
    boundary = early.exp()
    output = boundary * SECOND
    ends, deep = ends_of([output]), depths(ends_of([output]), STAGE_OF)
    assert frontier(ends, deep, 0, ends_of([early, boundary])) == set(ends_of([boundary]))
    assert frontier(ends, deep, 0, ends_of([early])) == set(ends_of([early]))


def test_there_is_none_where_a_parameter_is_reached_past_it() -> None:
    boundary = torch.ones(2) * FIRST
    output = boundary * SECOND + FIRST
    ends, deep = ends_of([output]), depths(ends_of([output]), STAGE_OF)
    assert frontier(ends, deep, 0, ends_of([boundary])) is None
    assert frontier(ends, deep, 0, []) is None


def test_a_first_hook_sees_what_came_and_changes_nothing() -> None:
    x, observed = torch.ones(2, requires_grad=True), list[Tensor]()
    y = x * 1
    handle = y.register_hook(lambda flow: flow * 3)
    y.register_hook(lambda flow: flow + 1)
    hook_first(y, lambda flow: observed.append(flow.clone()))
    y.backward(torch.full((2,), 2.0), retain_graph=True)
    assert observed[0].tolist() == [2.0, 2.0]
    assert x.grad.tolist() == [7.0, 7.0]
    handle.remove()
    y.backward(torch.full((2,), 2.0))
    assert x.grad.tolist() == [10.0, 10.0]


class Hooked(nn.Module):
    def __init__(self, hook: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.hook = nn.Linear(8, 8), hook

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.layer(x))
        if made.requires_grad:
            made.register_hook(self.hook)
        return made


HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamps": lambda flow: flow.clamp(-1e-3, 1e-3),
    "halves": lambda flow: flow * 0.5,
    "writes": lambda flow: flow.mul_(0.5),
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("at", [0, 2])
def test_a_stage_may_change_the_gradient_of_what_it_gives(hook: Callable[[Tensor], Tensor], at: int) -> None:
    stages = layers(torch.tanh, torch.sin, torch.tanh)
    verdict = checked(Job([*stages[:at], Hooked(hook), *stages[at + 1 :]]))
    assert verdict.outcome == "pass", str(verdict)
