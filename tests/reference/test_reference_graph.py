"""Where a stage ends in autograd's graph, told by the parameters that went into each tensor."""

import torch

from pipeproof.reference.graph import NONE, depths, ends_of, frontier

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
