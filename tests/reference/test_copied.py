"""Copies of models that hold what cannot be copied."""

import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof.reference.copied import copied, twin


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
    copy = copied(model).double()
    assert copy.group is group
    assert copy.settings.groups["model"] is group
    assert (copy.lock, copy.code, copy.last) == (model.lock, torch, model.last)
    assert copy.settings is not model.settings
    assert (copy[0].weight.dtype, model[0].weight.dtype) == (torch.float64, torch.float32)  # type: ignore[union-attr]


class Job:
    """What a hook may have in it: more than can be copied."""

    def __init__(self) -> None:
        self.calls = 0

    def __deepcopy__(self, memo: object) -> "Job":
        raise AssertionError("nobody copies a job")

    def note(self, module: nn.Module, given: object) -> None:
        self.calls += 1


class Hooked(nn.Module):
    """A module with a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[nn.Module] = []
        self.register_forward_pre_hook(self.note)

    def note(self, module: nn.Module, given: object) -> None:
        self.seen.append(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_twin_has_the_very_hooks_but_those_of_its_own_modules() -> None:
    job, module = Job(), nn.Sequential(Hooked())
    module.register_forward_pre_hook(job.note)
    module[0].register_forward_pre_hook(partial(Job.note, job))
    other = twin(module)
    other(torch.ones(1))
    assert job.calls == 2
    assert module[0].seen == []
    assert other[0].seen == [other[0]]


class Single(nn.Linear):
    """A module that will not be copied."""

    def __deepcopy__(self, memo: object) -> "Single":
        raise TypeError("there is one of me")


def test_a_module_is_never_shared() -> None:
    with pytest.raises(TypeError, match="there is one of me"):
        copied(nn.Sequential(Single(2, 2)))
