"""Digests: equal for equal bits, and for nothing else."""

import pytest
import torch

from validation.records.content import ContentError, digest


def test_equal_bits_have_one_digest_however_they_lie_in_memory() -> None:
    table = torch.arange(6.0).reshape(2, 3)
    assert digest(table) == digest(table.clone()) == digest(table.t().contiguous().t())
    assert len(digest(table)) == 64


@pytest.mark.parametrize(
    "other",
    [
        torch.arange(6.0),
        torch.arange(6.0).reshape(3, 2),
        torch.arange(6.0).reshape(2, 3).double(),
        torch.tensor([[0.0, 1, 2], [3, 4, 5.0000005]]),
        torch.tensor([[-0.0, 1, 2], [3, 4, 5]]),
        (torch.arange(6.0).reshape(2, 3),),
        {"x": torch.arange(6.0).reshape(2, 3)},
    ],
)
def test_other_bits_shapes_types_and_structures_have_another(other: object) -> None:
    assert digest(other) != digest(torch.arange(6.0).reshape(2, 3))


def test_numbers_of_no_dimension_low_precision_and_no_elements_have_one() -> None:
    values = [torch.tensor(1.0), torch.ones(3, dtype=torch.bfloat16), torch.empty(0), torch.tensor([True]), None, 3]
    assert len({digest(value) for value in values}) == len(values)


def test_parts_do_not_run_into_each_other() -> None:
    assert digest(("ab", "c")) != digest(("a", "bc"))
    assert digest([[1], 2]) != digest([[1, 2]])


def test_what_has_no_digest_is_named() -> None:
    with pytest.raises(ContentError, match="a object has no digest: expected tensors"):
        digest([object()])
