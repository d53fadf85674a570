"""Parts of ranks that hold one stage: their shares of the microbatches, replicas, and shards."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.shards import Shard, flat_shard
from pipeproof.core.replicas import Replicas
from pipeproof.pipeline.action import Action
from pipeproof.whitebox.matching import Local
from pipeproof.whitebox.rank import ModulePart, RankMade
from pipeproof.whitebox.shared_stages import claims, join_parts

TWICE = Replicas((0, 1), 4)
ALONE = Replicas((0, 0), 4)
UPPER, LOWER = Shard(((0, 1),)), Shard(((1, 2),))


def part(
    *gradient: float, content: bytes = b"w", shard: Shard | None = None, calls: tuple[Call, ...] = ()
) -> ModulePart:
    made = torch.tensor(gradient, dtype=torch.float32) if gradient else None
    return ModulePart((Local("w", "w", content=content),), (made,), {}, calls, {} if shard is None else {0: shard})


def made(*parts: ModulePart, actions: str = "") -> RankMade:
    return RankMade(parts, (), None, None, tuple(map(Action.parse, actions.split())), {})


def broken(ranks: list[RankMade], replicas: Replicas) -> list[tuple[str, int, str]]:
    (merged,) = [part for one in join_parts(ranks, replicas) for part in one.parts]
    return [
        (claim.law, claim.rank, claim.observed)
        for claim in claims((0, "w"), 0, merged.members, replicas)
        if not claim.holds
    ]


def test_replicas_are_one_stage_on_their_first_rank() -> None:
    first, second = join_parts([made(part(1, 2)), made(part(1, 2))], TWICE)
    assert (len(first.parts), len(second.parts)) == (1, 0)
    assert (first.share, second.share) == ((0, 2), (1, 3))


def test_two_copies_in_one_replica_stay_two() -> None:
    assert [len(one.parts) for one in join_parts([made(part(1, 2)), made(part(1, 2))], ALONE)] == [1, 1]


UNEQUAL = "another gradient than rank 0's, relative error 0.5"
# Two parts on two ranks, what they are of each other, what is broken.
PARTS: dict[str, tuple[ModulePart | None, ModulePart | None, Replicas, tuple[str, int, str] | None]] = {
    "equal": (part(1, 2), part(1, 2), TWICE, None),
    "another gradient": (part(1, 2), part(1, 3), TWICE, ("replicas", 1, UNEQUAL)),
    "no gradient": (part(1, 2), part(), TWICE, ("replicas", 1, "no gradient, and rank 0 has one")),
    "a gradient": (part(), part(1, 2), TWICE, ("replicas", 1, "a gradient, and rank 0 has none")),
    "weights": (part(1, 2), part(1, 2, content=b"v"), TWICE, ("initial-weights", 1, "other weights than rank 0's")),
    "a stage that one lacks": (part(1, 2), None, TWICE, ("replicas", 0, "held by replica 0 alone")),
    "zeros for none": (part(0, 0), part(), TWICE, None),
    "none for zeros": (part(), part(0, 0), TWICE, None),
    "zeros and nothing": (part(0, shard=UPPER), part(shard=LOWER), ALONE, None),
    "shards": (part(2, shard=LOWER), part(1, shard=UPPER), ALONE, None),
    "shards of replicas": (part(2, shard=LOWER), part(1, shard=UPPER), TWICE, None),
    "a hole": (
        part(1, shard=UPPER),
        part(2, shard=Shard(((2, 3),))),
        ALONE,
        ("shards", 0, "parts [0:1], [2:3] of [3]: not all of it"),
    ),
    "an overlap": (
        part(1, 2, shard=Shard(((0, 2),))),
        part(2, shard=LOWER),
        ALONE,
        ("shards", 0, "parts [0:2] and [1:2] overlap"),
    ),
    "a shard missing": (part(1, shard=UPPER), part(shard=LOWER), ALONE, ("shards", 0, "no gradient on rank 1")),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_equal_or_a_whole(name: str) -> None:
    one, other, replicas, complaint = PARTS[name]
    ranks = [made(*filter(None, [own])) for own in (one, other)]
    assert broken(ranks, replicas) == ([] if complaint is None else [complaint])
    if name in ("zeros and nothing", "shards", "shards of replicas"):
        (whole,) = join_parts(ranks, replicas)[0].parts
        assert isinstance(whole.gradients[0], Tensor)
        assert whole.gradients[0].tolist() == ([0, 0] if name == "zeros and nothing" else [1, 2])


FLAT = ModulePart((Local("w"),), (torch.ones(4),), shards={0: flat_shard(0, torch.ones(4))})
FOUR = Replicas((0, 1, 0, 1), 4)


def weights(*contents: str, first: int = 0) -> RankMade:
    """A rank with weights of those contents, whose names count from ``first`` on."""
    locals_ = tuple(Local(str(k), content=one.encode()) for k, one in enumerate(contents, start=first))
    return made(ModulePart(locals_, (None,) * len(contents)))


@pytest.mark.parametrize(
    ("ranks", "replicas", "stages"),
    [
        ([weights("a"), weights("x"), weights("b", first=1), weights("y", first=1)], FOUR, {0: "01", 2: "23"}),
        ([weights("a"), weights("x"), weights("b"), weights("y")], FOUR, {0: "01", 2: "23"}),
        ([weights("a"), weights("x"), weights("b"), weights("b")], FOUR, {0: "01", 2: "23"}),
        ([weights("a"), weights("b"), weights("b"), weights("a")], FOUR, {0: "03", 1: "12"}),
        ([weights("a"), weights("b"), weights("b"), weights("x")], FOUR, {0: "0", 1: "12", 3: "3"}),
        ([weights("a"), weights("x"), weights("b")], Replicas((0, 1, 0), 4), {0: "0", 1: "1", 2: "2"}),
        ([weights("a"), weights("x")], ALONE, {0: "0", 1: "1"}),
        ([made(FLAT), made(replace(FLAT, locals=(Local("v"),)))], TWICE, {0: "01"}),
        ([made(FLAT), made()], TWICE, {0: "01"}),
    ],
    ids=[
        "all drawn",
        "counted from 0",
        "one drawn",
        "reversed",
        "reversed, drawn",
        "unequal",
        "one replica",
        "flat",
        "",
    ],
)
def test_a_list_says_who_holds_a_stage(ranks: list[RankMade], replicas: Replicas, stages: dict[int, str]) -> None:
    joined = join_parts(ranks, replicas, {"0": b"a", "1": b"b"})
    found = {k: "".join(str(at) for at, _ in part.members) for k, one in enumerate(joined) for part in one.parts}
    assert found == stages
    if replicas is FOUR and len(stages) == 2 and stages[0] == "01":
        assert [[one.said for one in joined[rank].parts[0].members[1][1].locals] for rank in (0, 2)] == [["0"], ["1"]]


@pytest.mark.parametrize("other", [FLAT, None])
def test_a_part_left_out_is_no_missing_parameter(other: ModulePart | None) -> None:
    ranks = [made(FLAT), made() if other is None else made(replace(other, locals=(Local("v"),)))]
    (merged,) = [part for one in join_parts(ranks, TWICE) for part in one.parts]
    for k in range(len(merged.locals)):
        assert [one.observed for one in claims((0, "w"), k, merged.members, TWICE) if not one.holds] == []


def test_shards_of_other_peers_are_other_stages() -> None:
    near, far = (part(1, shard=replace(UPPER, peers=peers)) for peers in ((0, 2), (1, 3)))
    assert [len(one.parts) for one in join_parts([made(near), made(far)], ALONE)] == [1, 1]


def test_calls_of_all_replicas_follow_each_other() -> None:
    def calls(*ends: int) -> tuple[Call, ...]:
        return tuple(Call(True, backwards=[end]) for end in ends)

    first, _ = join_parts([made(part(1, calls=calls(5, 3))), made(part(1, calls=calls(0, 7)))], TWICE)
    assert [call.backwards for call in first.parts[0].calls or ()] == [[5], [3], [2**32], [2**32 + 7]]


def test_actions_have_the_numbers_of_all_microbatches() -> None:
    _, second = join_parts([made(), made(actions="0F0 0F1 0B0 0F2")], TWICE)
    assert list(map(str, second.actions or ())) == ["0F1", "0F3", "0B1", "0F-3"]
