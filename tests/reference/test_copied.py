"""Copies of models that hold what cannot be copied."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof.reference.copied import deep_copy


class Settings:
    """Of a model: how its ranks speak with each other, two levels down."""

    def __init__(self, group: object) -> None:
        self.groups = {"model": group}


def test_a_process_group_is_shared_and_the_rest_is_copied() -> None:
    store = dist.HashStore()
    group = dist.ProcessGroupGloo(store, 0, 1)
    model = nn.Sequential(nn.Linear(2, 2))
    model.settings, model.group, model.lock = Settings(group), group, threading.Lock()  # type: ignore[assignment]
    model.code, model.last = torch, nn.Linear(2, 2)(torch.ones(2))  # type: ignore[assignment]
    copy = deep_copy(model).double()
    assert copy.group is group
    assert copy.settings.groups["model"] is group
    assert (copy.lock, copy.code, copy.last) == (model.lock, torch, model.last)
    assert copy.settings is not model.settings
    assert (copy[0].weight.dtype, model[0].weight.dtype) == (torch.float64, torch.float32)  # type: ignore[union-attr]


class Single(nn.Linear):
    """A module that will not be copied."""

    def __deepcopy__(self, memo: object) -> "Single":
        raise TypeError("there is one of me")


def test_a_module_is_never_shared() -> None:
    with pytest.raises(TypeError, match="there is one of me"):
        deep_copy(nn.Sequential(Single(2, 2)))
