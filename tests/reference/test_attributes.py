"""Attributes of a module are put back as they were when it was called, as far as they are still there."""

import torch
from torch import nn

from pipeproof.reference.attributes import attributes_of, list_changed, put_back


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count, self.labels = nn.Linear(2, 2), 1, torch.tensor([1, 2])
        self.mask: torch.Tensor | None = torch.ones(2)


def test_numbers_and_tensors_that_are_there_are_put_back_for_a_time() -> None:
    stage = nn.Sequential(Told())
    told, first = stage[0], stage[0].labels
    had = tuple(attributes_of(stage))
    told.count, told.labels, told.mask = 2, torch.tensor([3]), None
    assert list_changed(stage, had) == ["0.count", "0.labels"]  # nobody has that mask any more
    with put_back(stage, had):
        assert (told.count, told.mask) == (1, None)
        assert told.labels is first
        told.count = 5
    assert (told.count, told.labels.tolist()) == (5, [3])


def test_what_was_written_to_is_not_known() -> None:
    told = Told()
    had = tuple(attributes_of(told))
    labels = told.labels
    told.labels = torch.tensor([3])
    labels += 1
    assert list_changed(told, had) == []


def test_what_torch_keeps_there_is_not_touched() -> None:
    told = Told()
    had = tuple(attributes_of(told))
    told.eval()
    with put_back(told, had):
        assert not told.training
    assert {one.name for one in had} >= {"count", "labels", "mask", "in_features"}
