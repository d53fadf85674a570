"""An optimizer's settings are put off by a part of them, and nothing else of it is."""

import copy

import torch
from torch import nn

from pipeproof.reference.settings_off import settings_off


def test_rates_and_betas_are_smaller_and_all_else_is_as_it_was() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.5, betas=(0.5, 0.25), weight_decay=0.0, amsgrad=True)
    before = copy.deepcopy(optimizer.param_groups[0])
    after = settings_off(optimizer, 0.5).param_groups[0]
    assert (after["lr"], after["betas"], after["eps"]) == (0.25, (0.25, 0.125), before["eps"] / 2)
    assert {name for name in before if name != "params" and after[name] != before[name]} == {"lr", "betas", "eps"}
    assert after["params"] == [weight]
    assert torch.equal(weight, torch.ones(2))


def test_a_rate_that_is_a_tensor_is_another_one() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=rate)
    assert settings_off(optimizer, 0.5).param_groups[0]["lr"] == 0.25
    assert rate == 0.5


def test_by_nothing_it_is_as_it_was() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    group = optimizer.param_groups[0]
    assert settings_off(optimizer, 0.0).param_groups[0] is group
    assert group["lr"] == 0.1
