"""How often each microbatch is in what ranks have of a parameter."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from pipeproof.core.observe.shards import Shard
from pipeproof.core.replicas import Replicas
from pipeproof.explain.copies import makeups
from pipeproof.explain.members import Members
from pipeproof.reference.step import Contribution, Expected
from pipeproof.whitebox.matching import Local
from pipeproof.whitebox.rank import ModulePart
from pipeproof.whitebox.stages_in_order import PlacedStage

DRAW = torch.Generator().manual_seed(0)
EACH = [torch.randn(32, generator=DRAW) for _ in range(4)]
TOTAL = torch.stack(EACH).sum(dim=0)
EXPECTED = Expected("train", (0.0,) * 4, 0.0, gradients={(0, "w"): TOTAL})
TWO = Replicas((0, 1), 4)
LEFT, RIGHT = Shard(((0, 16),)), Shard(((16, 32),))


def members(*ranks: Tensor | None, shards: Sequence[Shard] = (), known: bool = True) -> Members:
    """What each rank has of one parameter; not ``known``: what microbatches give is known together alone."""
    own: list[Mapping[int, Shard]] = [{0: shard} for shard in shards] or [{} for _ in ranks]
    parts = [ModulePart((Local("w"),), (one,), shards=lying) for one, lying in zip(ranks, own, strict=True)]
    merged = ModulePart((Local("w"),), (ranks[0],), members=tuple(enumerate(parts)))
    contributions = [Contribution(0.0, {(0, "w"): one}) for one in EACH] if known else ()
    return Members([PlacedStage(0, 0, merged, {0: "w"}, {})], TWO, lambda: contributions, [None] * len(ranks))


def of(*counts: float) -> Tensor:
    return torch.stack([count * one for count, one in zip(counts, EACH, strict=True)]).sum(dim=0)


@pytest.mark.parametrize(
    "counts", [(1, 1, 1, 1), (1, 0, 1, 0), (2, 0, 2, 0), (1, 1, 1, 0), (0.5, 0.5, 0.5, 0.5), (0, 0, 0, 0), (1, 2, 1, 1)]
)
def test_how_often_each_microbatch_is_there(counts: tuple[float, ...]) -> None:
    made = makeups(members(of(*counts), TOTAL), EXPECTED)["w"]
    assert [*made.counts] == [counts, (1.0,) * 4]
    assert made.right == made.alike == (counts == (1, 1, 1, 1))


@pytest.mark.parametrize("factor", [1.0, 0.5, -1.0, 0.0])
def test_of_what_is_known_together_alone_a_factor_is_told(factor: float) -> None:
    made = makeups(members(factor * TOTAL, EACH[0], known=False), EXPECTED)["w"]
    assert [*made.counts] == [(factor,), None]


def test_shards_are_alike_where_each_lies_as_it_should() -> None:
    lost = of(1, 1, 0, 1)
    alike = makeups(members(LEFT.of(lost), RIGHT.of(lost), shards=(LEFT, RIGHT)), EXPECTED)["w"]
    assert (alike.right, alike.alike) == (False, True)
    differ = makeups(members(LEFT.of(lost), RIGHT.of(TOTAL), shards=(LEFT, RIGHT)), EXPECTED)["w"]
    assert (differ.right, differ.alike) == (False, False)


@pytest.mark.parametrize("gradient", [None, TOTAL[:3], TOTAL / 0], ids=["none", "another shape", "not finite"])
def test_what_cannot_be_held_against_what_is_due_is_left_out(gradient: Tensor | None) -> None:
    assert makeups(members(TOTAL, gradient), EXPECTED) == {}
