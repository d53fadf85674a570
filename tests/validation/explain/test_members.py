"""How often each microbatch is in what ranks have of a parameter, and what a norm of it may be."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from pipeproof.core.observe.shards import Shard
from pipeproof.core.replicas import Replicas
from pipeproof.explain.members import Members, are_alike, makeups
from pipeproof.reference.step import Contribution, Expected
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


DRAW = torch.Generator().manual_seed(0)
OF_EACH = [torch.randn(32, generator=DRAW) for _ in range(4)]
TOTAL = torch.stack(OF_EACH).sum(dim=0)
EXPECTED = Expected("train", (0.0,) * 4, 0.0, gradients={(0, "w"): TOTAL})
TWO = Replicas((0, 1), 4)
LEFT, RIGHT = Shard(((0, 16),)), Shard(((16, 32),))


def held_by(*ranks: Tensor | None, shards: Sequence[Shard] = (), known: bool = True) -> Members:
    """What each rank has of one parameter; not ``known``: what microbatches give is known together alone."""
    own: list[Mapping[int, Shard]] = [{0: shard} for shard in shards] or [{} for _ in ranks]
    parts = [ModulePart((Local("w"),), (one,), shards=lying) for one, lying in zip(ranks, own, strict=True)]
    merged = ModulePart((Local("w"),), (ranks[0],), members=tuple(enumerate(parts)))
    contributions = [Contribution(0.0, {(0, "w"): one}) for one in OF_EACH] if known else ()
    return Members([PlacedStage(0, 0, merged, {0: "w"}, {})], TWO, lambda: contributions, [None] * len(ranks))


def of(*counts: float) -> Tensor:
    return torch.stack([count * one for count, one in zip(counts, OF_EACH, strict=True)]).sum(dim=0)


@pytest.mark.parametrize(
    "counts", [(1, 1, 1, 1), (1, 0, 1, 0), (2, 0, 2, 0), (1, 1, 1, 0), (0.5, 0.5, 0.5, 0.5), (0, 0, 0, 0), (1, 2, 1, 1)]
)
def test_how_often_each_microbatch_is_there(counts: tuple[float, ...]) -> None:
    made = makeups(held_by(of(*counts), TOTAL), EXPECTED)["w"]
    assert [one.counts for one in made] == [counts, (1.0,) * 4]
    assert all(one.right for one in made) == are_alike(made) == (counts == (1, 1, 1, 1))


@pytest.mark.parametrize("factor", [1.0, 0.5, -1.0, 0.0])
def test_of_what_is_known_together_alone_a_factor_is_told(factor: float) -> None:
    made = makeups(held_by(factor * TOTAL, OF_EACH[0], known=False), EXPECTED)["w"]
    assert [one.counts for one in made] == [(factor,), None]


@pytest.mark.parametrize("counts", [(1, 1, 0, 1), (61 / 64,) * 4, (1.0004,) * 3 + (0.0,)])
def test_shards_are_alike_where_each_lies_as_it_should(counts: tuple[float, ...]) -> None:
    lost = of(*counts)
    for other, alike in ((lost, True), (TOTAL, False)):
        made = makeups(held_by(LEFT.of(lost), RIGHT.of(other), shards=(LEFT, RIGHT)), EXPECTED)["w"]
        assert (all(one.right for one in made), are_alike(made)) == (False, alike)


@pytest.mark.parametrize("gradient", [None, TOTAL[:3], TOTAL / 0], ids=["none", "another shape", "not finite"])
def test_what_cannot_be_held_against_what_is_due_is_left_out(gradient: Tensor | None) -> None:
    assert makeups(held_by(TOTAL, gradient), EXPECTED) == {}
