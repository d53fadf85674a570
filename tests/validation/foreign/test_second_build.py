"""A reference that is not the same every time is found out, by its weights or by its losses."""

from collections.abc import Callable

import torch
from torch import nn

from validation.foreign.second_build import Twin
from validation.foreign.task import Task
from validation.observers.sketch import contents

PAIR = (torch.ones(2, 4), torch.zeros(2, 4))


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))


def drawing() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))


def twin_of(build: Callable[[], nn.Module]) -> tuple[Twin, float, Task]:
    """A twin, the loss of the first model, and their task."""
    task = Task(lambda model, data: None, build, (PAIR,), nn.functional.mse_loss, None)
    model = task.built("cpu")
    twin = Twin(task, "cpu", contents(model))
    assert len(list(twin)) == 1
    return twin, task.loss.function(model(PAIR[0]), PAIR[1]).item(), task


def test_a_seeded_reference_is_the_same_every_time() -> None:
    twin, loss, task = twin_of(seeded)
    assert twin.other_weights == ""
    assert twin.other_loss(loss, task.batches(twin.model)[0]) == ""
    assert twin.other_loss(float("nan"), task.batches(twin.model)[0]).startswith("two forwards of microbatch 0")


def test_weights_drawn_anew_are_told_by_name() -> None:
    twin, _, _ = twin_of(drawing)
    assert twin.other_weights.startswith("called twice it gave other weights, first 0.weight: seed it")


def test_dropout_that_nobody_seeded_is_told_by_the_loss() -> None:
    twin, loss, task = twin_of(dropping)
    assert twin.other_weights == ""
    assert "switch dropout off" in twin.other_loss(loss, task.batches(twin.model)[0])
