"""Rows and columns in the place of others are told; what only differs is not."""

import torch

from pipeproof.diagnosis.moved import moved_along
from tests.support.golden import golden

DUE = torch.arange(24.0).reshape(6, 4)


def changed(rows: slice, other: torch.Tensor, *, columns: slice = slice(None)) -> torch.Tensor:
    made = DUE.clone()
    made[rows, columns] = other
    return made


def test_rows_and_columns_of_elsewhere() -> None:
    golden(moved_along(changed(slice(3, 6), DUE[2:5]), DUE))
    golden(moved_along(changed(slice(None), DUE[:, 1:3], columns=slice(2, 4)), DUE))
    golden(moved_along(torch.tensor([0.0, 1, 0, 1, 2, 5]), torch.arange(6.0)))


def test_what_only_differs_tells_nothing() -> None:
    assert moved_along(DUE, DUE) == ""
    assert moved_along(DUE + 0.5, DUE) == ""
    assert moved_along(changed(slice(3, 6), torch.zeros(3, 4)), DUE) == "", "zeros are nobody's"
    assert moved_along(changed(slice(3, 6), torch.randn(3, 4)), DUE) == ""
    assert moved_along(DUE[:3], DUE) == "", "of another shape"
    assert moved_along(torch.tensor([1.0, 0, 2]), torch.tensor([0.0, 1, 2])) == "", "two numbers, by chance"
