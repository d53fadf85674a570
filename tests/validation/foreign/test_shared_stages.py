"""What several ranks hold of one stage is one stage, and what must be equal between them is compared."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipeline.action import Action
from validation.diagnosis.members import Replicas
from validation.foreign.matching import Local
from validation.foreign.rank import Part, RankMade
from validation.foreign.shared_stages import claims, together
from validation.observers.shards import Shard
from validation.observers.watching import Call

TWICE = Replicas((0, 1), 4)
ALONE = Replicas((0, 0), 4)
UPPER, LOWER = Shard(((0, 1),)), Shard(((1, 2),))


def part(*gradient: float, content: bytes = b"w", shard: Shard | None = None, calls: tuple[Call, ...] = ()) -> Part:
    made = torch.tensor(gradient, dtype=torch.float32) if gradient else None
    return Part((Local("w", "w", content=content),), (made,), {}, calls, {} if shard is None else {0: shard})


def made(*parts: Part, actions: str = "") -> RankMade:
    return RankMade(parts, (), None, None, tuple(map(Action.parse, actions.split())), {})


def broken(ranks: list[RankMade], replicas: Replicas) -> list[tuple[str, int, str]]:
    (merged,) = [part for one in together(ranks, replicas) for part in one.parts]
    return [
        (claim.law, claim.rank, claim.seen)
        for claim in claims((0, "w"), 0, merged.members, replicas)
        if not claim.holds
    ]


def test_replicas_are_one_stage_on_the_first_of_their_ranks() -> None:
    first, second = together([made(part(1, 2)), made(part(1, 2))], TWICE)
    assert (len(first.parts), len(second.parts)) == (1, 0)
    assert (first.share, second.share) == ((0, 2), (1, 3))
    assert broken([made(part(1, 2)), made(part(1, 2))], TWICE) == []


def test_two_copies_in_one_replica_stay_two() -> None:
    assert [len(one.parts) for one in together([made(part(1, 2)), made(part(1, 2))], ALONE)] == [1, 1]


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (part(1, 3), ("replicas", 1, "another gradient than rank 0's, relative error 0.5")),
        (part(), ("replicas", 1, "no gradient, and rank 0 has one")),
        (part(1, 2, content=b"v"), ("initial-weights", 1, "other weights than rank 0's")),
    ],
)
def test_replicas_that_differ(other: Part, complaint: tuple[str, int, str]) -> None:
    assert broken([made(part(1, 2)), made(other)], TWICE) == [complaint]


def test_a_stage_that_a_replica_lacks() -> None:
    assert broken([made(part(1, 2)), made()], TWICE) == [("replicas", 0, "held by replica 0 alone")]


@pytest.mark.parametrize("replicas", [ALONE, TWICE])
def test_shards_are_gathered(replicas: Replicas) -> None:
    ranks = [made(part(2, shard=LOWER)), made(part(1, shard=UPPER))]
    (whole,) = together(ranks, replicas)[0].parts
    assert isinstance(whole.gradients[0], Tensor)
    assert whole.gradients[0].tolist() == [1, 2]
    assert broken(ranks, replicas) == []


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ((part(1, shard=UPPER), part(2, shard=Shard(((2, 3),)))), "parts [0:1], [2:3] of [3]: not all of it"),
        ((part(1, 2, shard=Shard(((0, 2),))), part(2, shard=LOWER)), "parts [0:2] and [1:2] overlap"),
        ((part(1, shard=UPPER), part(shard=LOWER)), "no gradient on rank 1"),
    ],
)
def test_shards_that_are_no_whole(parts: tuple[Part, ...], complaint: str) -> None:
    assert broken(list(map(made, parts)), ALONE) == [("shards", 0, complaint)]


def test_shards_of_other_peers_are_other_stages() -> None:
    near, far = (part(1, shard=replace(UPPER, peers=peers)) for peers in ((0, 2), (1, 3)))
    assert [len(one.parts) for one in together([made(near), made(far)], ALONE)] == [1, 1]


def test_calls_of_all_replicas_follow_each_other() -> None:
    def calls(*ends: int) -> tuple[Call, ...]:
        return tuple(Call(True, backwards=[end]) for end in ends)

    first, _ = together([made(part(1, calls=calls(5, 3))), made(part(1, calls=calls(0, 7)))], TWICE)
    assert [call.backwards for call in first.parts[0].calls or ()] == [[1], [0], [2], [3]]


def test_actions_have_the_numbers_of_all_microbatches() -> None:
    _, second = together([made(), made(actions="0F0 0F1 0B0 0F2")], TWICE)
    assert list(map(str, second.actions or ())) == ["0F1", "0F3", "0B1", "0F-3"]
