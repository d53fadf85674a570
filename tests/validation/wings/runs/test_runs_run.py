"""What ranks have of a tensor, put together: parts count once, copies are compared, and sums that nobody formed."""

import pytest
import torch
from torch import Tensor

from pipeproof.core.observe.shards import Shard
from pipeproof.core.observe.sketch import brief
from pipeproof.wings.runs.run import Part, whole_tensor

WHOLE = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
HALVES = [Shard(((0, 4), (0, 4)), (6, 4)), Shard(((4, 6), (0, 4)), (6, 4))]


def part(rank: int, at: Shard, tensor: Tensor | None = None) -> Part:
    return Part(rank, at, brief(at.of(WHOLE) if tensor is None else tensor, at=at))


def test_parts_count_once_and_copies_that_differ_are_told() -> None:
    parts = [part(rank, HALVES[rank % 2]) for rank in range(4)]
    found = whole_tensor(parts)
    assert (found.sketch.digest, found.apart) == (brief(WHOLE).digest, None)
    odd = whole_tensor([*parts[:3], part(3, HALVES[1], 2 * HALVES[1].of(WHOLE))])
    assert (odd.apart, odd.sketch) == ((3, 1), found.sketch)
    wrong = whole_tensor([parts[0], part(1, HALVES[1], 2 * HALVES[1].of(WHOLE))])
    assert wrong.farthest(found) == 1
    assert wrong.farthest(whole_tensor([part(0, Shard(((0, 6), (0, 4)), (6, 4)))])) is None


def test_addends_of_a_sum_that_nobody_formed_are_about_their_sum() -> None:
    whole = ((0, 6), (0, 4))
    addends = [Shard(whole, (6, 4), addend=(k, 2)) for k in range(2)]
    found = whole_tensor([part(k, at, (k + 1) * WHOLE) for k, at in enumerate(addends)]).sketch
    again = whole_tensor([part(k, at, (k + 1) * WHOLE) for k, at in enumerate(addends)]).sketch
    assert found is not None
    assert found.digest == again.digest != brief(3 * WHOLE).digest
    assert found.distance(brief(3 * WHOLE)) == pytest.approx(0.0, abs=1e-6)
