"""What modules put out is noted, each tensor once, and nothing is left behind."""

import torch
from torch import Tensor, nn

from pipeproof.reference.outputs import order_of_use, outputs_noted
from tests.support.golden import golden


def test_each_tensor_is_told_once_by_the_innermost_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Identity()))
    told: list[tuple[str, Tensor]] = []
    with outputs_noted(model, lambda place, tensor: told.append((place, tensor))):
        made = model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    golden("\n".join(place for place, _ in told))
    assert told[1][1] is made
    model(torch.ones(1, 2))
    assert len(told) == 4


class PassedBy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_tensor_that_a_layer_with_parameters_hands_on_is_told_there_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), PassedBy(2, 2), nn.Sequential(PassedBy(2, 2)))
    told: list[tuple[str, Tensor]] = []
    with outputs_noted(model, lambda place, tensor: told.append((place, tensor))):
        made = model(torch.ones(1, 2))
    golden("\n".join(place for place, _ in told))
    assert all(tensor is made for _, tensor in told)


def test_modules_are_used_in_the_order_in_which_their_last_calls_end() -> None:
    twice = nn.Linear(2, 2)
    model = nn.Sequential(twice, nn.Sequential(nn.Tanh()), twice)
    ended = order_of_use(model, [torch.ones(1, 2)])
    assert sorted(ended, key=ended.__getitem__) == ["1.0", "1", "0", ""]
