"""What modules put out is noted, each tensor once, and nothing is left behind."""

import torch
from torch import Tensor, nn

from pipeproof.reference.outputs import outputs_noted


def test_each_tensor_is_told_once_by_the_innermost_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Identity()))
    told: list[tuple[str, Tensor]] = []
    with outputs_noted(model, lambda place, tensor: told.append((place, tensor))):
        made = model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert [place for place, _ in told] == ["output 0 of 0", "output 0 of 1.0"] * 2
    assert told[1][1] is made
    model(torch.ones(1, 2))
    assert len(told) == 4
