"""What a norm may be of what ranks have in common; where it fits nothing, nothing is said."""

import torch
from torch import Tensor

from pipeproof.core.observe.shards import Shard
from pipeproof.core.replicas import Replicas
from pipeproof.explain.members import Members
from pipeproof.whitebox.matching import Local
from pipeproof.whitebox.rank import ModulePart, RankMade
from pipeproof.whitebox.shared_stages import join_parts
from pipeproof.whitebox.stages_in_order import PlacedStage

REPLICAS = Replicas((0, 1), 4)
UPPER, LOWER = Shard(((0, 2),)), Shard(((2, 4),))
EACH = [torch.randn(4, generator=torch.Generator().manual_seed(m)) for m in range(4)]
WHOLE = sum(EACH[1:], EACH[0])


def part(gradient: Tensor, shard: Shard | None = None) -> RankMade:
    one = ModulePart((Local("w", "w"),), (gradient,), shards={} if shard is None else {0: shard})
    return RankMade((one,), (), None, None, None, {})


def found(*ranks: RankMade, norms: tuple[float | None, float | None]) -> list[tuple[int | None, str]]:
    (merged,) = join_parts(ranks, REPLICAS)[0].parts
    members = Members([PlacedStage(0, 0, merged, {0: "w"}, {})], REPLICAS, tuple, norms)
    return [(cause.rank, cause.detail) for cause in members.norm_causes()]


HALVES = part(WHOLE[:2], UPPER), part(WHOLE[2:], LOWER)


def test_a_norm_that_is_right_or_fits_nothing() -> None:
    assert found(part(WHOLE), part(WHOLE), norms=(1.0, None)) == []
    assert found(part(WHOLE), part(WHOLE), norms=(WHOLE.norm().item(), None)) == []
    assert found(*HALVES, norms=(WHOLE.norm().item(), None)) == []


def test_a_norm_of_own_shards() -> None:
    size = WHOLE[2:].norm().item()
    ((rank, words),) = found(*HALVES, norms=(None, size))
    assert (rank, "rank 1" in words) == (1, True)
    assert not found(*HALVES, norms=(None, 1.00015 * size)), "near it by chance"


def test_a_norm_that_counts_copies_for_each_rank() -> None:
    twice = WHOLE.norm().item() * 2**0.5
    told = (None, "parameters that several ranks hold are counted once for each rank")
    assert found(part(WHOLE), part(WHOLE), norms=(twice, twice)) == [told]
    assert found(part(WHOLE), part(WHOLE), norms=(twice, 1.001 * twice)) == [], "ranks do not agree"
