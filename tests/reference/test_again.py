"""A call that is run again is the call that was, to the last bit, and leaves nothing behind."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeproof.reference.again import Again, Called, State, objective_of

Make = Callable[[], nn.Module]


class Keyword(nn.Module):
    """Takes a structure and a number by name, and gives several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: dict[str, Tensor], *, times: int) -> tuple[Tensor, Tensor]:
        out = self.linear(given["x"]) * times
        return out, out.sum(dim=1)


class Counting(nn.Module):
    """Gives what depends on a buffer, which it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x) * self.count


def of_tensors(given: object) -> list[Tensor]:
    return [one for one in tree_leaves(given) if isinstance(one, Tensor)]


def called(stage: nn.Module, *arguments: Any, **named: Any) -> Called:
    return Called.of(stage, arguments, named, tensors=of_tensors, copy=Tensor.clone)


MAKES: list[Make] = [
    lambda: nn.Linear(4, 4),
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)),
    lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    Counting,
]


@pytest.mark.parametrize("make", MAKES)
def test_a_call_gives_again_what_it_gave(make: Make) -> None:
    torch.manual_seed(0)
    stage, x = make(), torch.randn(8, 4)
    kept = called(stage, x)
    first = stage(x)
    stage(torch.randn(8, 4)), torch.randn(3)  # what comes in between changes nothing
    buffers = {name: one.clone() for name, one in stage.named_buffers()}
    for _ in range(2):
        assert torch.equal(Again(stage)(kept, *kept.tensors), first)
    assert all(torch.equal(one, buffers[name]) for name, one in stage.named_buffers())


def test_modes_and_autocast_are_those_of_the_call() -> None:
    stage, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(8, 4)
    stage.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = called(stage, x)
        first = stage(x)
    stage.train()
    again = Again(stage)(kept, *kept.tensors)
    assert (again.dtype, first.dtype) == (torch.bfloat16,) * 2
    assert torch.equal(again, first)
    assert all(part.training for part in stage.modules())


def test_structures_and_names_come_as_they_came() -> None:
    stage, x = Keyword(), torch.randn(8, 4, requires_grad=True)
    kept = called(stage, {"x": x}, times=3)
    x.detach().mul_(2)  # a copy is kept
    assert kept.wanting == {0}
    out, total = Again(stage)(kept, *kept.tensors)
    expected, _ = stage({"x": kept.tensors[0]}, times=3)
    assert torch.equal(out, expected)
    assert torch.equal(total, expected.sum(dim=1))


def test_a_stage_goes_by_its_own_names_and_is_not_copied_with_its_calls() -> None:
    stage = nn.Sequential(nn.Linear(4, 4))
    assert dict(Again(stage).named_parameters()) == dict(stage.named_parameters())
    kept = called(stage, torch.randn(2, 4))
    assert copy.deepcopy((Again(stage), kept))[1] is kept


def test_what_flowed_to_outputs_is_where_the_backward_begins() -> None:
    stage, x = nn.Linear(4, 4), torch.randn(8, 4)
    flow = torch.randn(8, 4)
    flow[0, 0], flow[1] = -0.0, torch.tensor([float("inf"), 1e-45, 1e38, 0.0])
    out = stage(x)
    observed = []
    out.register_hook(observed.append)
    objective_of(out, {0: flow}).backward()
    (came,) = observed
    assert torch.equal(came.view(torch.int32), flow.view(torch.int32))


def test_an_output_of_which_another_was_made_has_what_came_from_behind_told_apart() -> None:
    weight, x = torch.randn(4, requires_grad=True), torch.randn(4)
    behind, whole = torch.randn(4), torch.randn(4)
    first = x * weight
    second = first * 3
    more: dict[int, Tensor] = {}
    objective_of((first, second), {0: whole, 1: behind}, note=more.__setitem__).backward()
    assert torch.equal(weight.grad, whole * x), "as all that came to it was, and not that and the second's"
    assert more.keys() == {0}
    torch.testing.assert_close(more[0], behind * 3)


def test_where_nothing_flows_there_is_nothing_to_differentiate() -> None:
    assert not objective_of(torch.randn(3, requires_grad=True), {}).requires_grad


def test_the_value_of_what_flowed_is_a_size_in_which_nothing_cancels() -> None:
    out = torch.tensor([1.0, 2.0], requires_grad=True)
    assert objective_of(out, {0: torch.tensor([2.0, -1.0])}).item() == 4.0


def test_a_state_says_whether_a_module_has_other_buffers() -> None:
    stage = Counting()
    before = State.of(stage)
    stage(torch.randn(2, 4))
    with before.resume(stage):
        assert stage.count.item() == 0
    assert stage.count.item() == 1
