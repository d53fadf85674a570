"""Parts of parameters: where they lie, what makes up a whole, and what does not."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from validation.observers.shards import Shard, ShardError, gathered, shard_at, shard_of, untiled


@dataclass(frozen=True)
class Placement:
    dim: int | None = None
    partial: bool = False

    def is_shard(self) -> bool:
        return self.dim is not None

    def is_partial(self) -> bool:
        return self.partial


class Replicate(Placement):
    pass


Split = type("Shard", (Placement,), {})  # as DTensor's is called


@dataclass(frozen=True)
class Mesh:
    """As much of a device mesh as is looked at."""

    mesh: Tensor
    coordinate: tuple[int, ...]

    def size(self, dim: int) -> int:
        return self.mesh.shape[dim]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.coordinate


@dataclass(frozen=True)
class Distributed:
    """As much of a DTensor as is looked at."""

    shape: tuple[int, ...]
    placements: tuple[Any, ...]
    device_mesh: Mesh

    def to_local(self) -> Tensor:
        return torch.zeros(0)


def placed(shape: tuple[int, ...], placements: tuple[Any, ...], coordinate: tuple[int, ...]) -> Shard:
    size = (2,) * len(placements)
    mesh = Mesh(torch.arange(2 ** len(placements)).view(size), coordinate)
    found = shard_of(Distributed(shape, placements, mesh))  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("shape", "placements", "coordinate", "bounds"),
    [
        ((4, 3), (Split(0),), (1,), ((2, 4), (0, 3))),
        ((5, 3), (Split(0),), (0,), ((0, 3), (0, 3))),
        ((5, 3), (Split(0),), (1,), ((3, 5), (0, 3))),
        ((1, 3), (Split(0),), (1,), ((1, 1), (0, 3))),
        ((4, 6), (Replicate(), Split(1)), (0, 1), ((0, 4), (3, 6))),
        ((8,), (Split(0), Split(0)), (1, 0), ((4, 6),)),
    ],
)
def test_where_a_dtensor_s_part_lies(
    shape: tuple[int, ...], placements: tuple[Any, ...], coordinate: tuple[int, ...], bounds: Any
) -> None:
    found = placed(shape, placements, coordinate)
    assert (found.bounds, found.shape, found.peers) == (bounds, shape, tuple(range(2 ** len(placements))))


def test_a_plain_tensor_is_no_part() -> None:
    assert shard_of(torch.ones(3)) is None


def test_a_sum_that_was_not_formed_is_refused() -> None:
    with pytest.raises(ShardError, match="it is Partial: reduce it over its mesh first"):
        placed((4,), (Placement(partial=True),), (0,))


def test_a_placement_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ShardError, match="expected Shard or Replicate"):
        placed((4,), (Placement(0),), (0,))


def test_an_index_and_a_part() -> None:
    assert shard_at(slice(2, 4), torch.ones(2, 3)).bounds == ((2, 4), (0, 3))
    assert shard_at((slice(0, 2), slice(1, 2)), torch.ones(2, 1)).bounds == ((0, 2), (1, 2))
    assert str(shard_at((slice(0, 2), slice(1, 2)), None)) == "[0:2, 1:2]"


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (slice(0, 3), r"its index is slice\(0, 3, None\), but its shape \[2, 3\]"),
        (slice(None, 2), "expected slices that say from where to where"),
        (slice(0, 4, 2), "expected slices that say from where to where"),
        ((0,), "its index has 0: expected slices"),
    ],
)
def test_an_index_that_does_not_fit(index: Any, sentence: str) -> None:
    with pytest.raises(ShardError, match=sentence):
        shard_at(index, torch.ones(2, 3))


def test_parts_put_together() -> None:
    whole = torch.arange(6.0).view(3, 2)
    upper, lower = Shard(((0, 1), (0, 2))), Shard(((1, 3), (0, 2)))
    made = gathered([(lower, whole[1:]), (upper, whole[:1])])
    assert made is not None
    assert torch.equal(made, whole)
    assert gathered([(upper, None), (lower, None)]) is None
    assert untiled([upper, lower, upper]) == ""


def test_parts_that_are_no_whole() -> None:
    part, other = Shard(((0, 2), (0, 2))), Shard(((1, 3), (0, 2)))
    assert untiled([part, other]) == "parts [0:2, 0:2] and [1:3, 0:2] overlap"
    assert untiled([Shard(((0, 1), (0, 2)), (3, 2))]) == "parts [0:1, 0:2] of [3, 2]: not all of it"
    assert untiled([part, Shard(((2, 3),))]) == "parts of different dimensions"
