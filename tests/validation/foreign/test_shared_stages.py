"""Ranks that hold one stage: their shares of the microbatches, replicas, and pipelines that run both ways."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.core.replicas import Replicas
from pipeproof.core.verdict import Verdict
from pipeproof.foreign import HandedBack, WhiteBox, watch
from pipeproof.foreign.matching import Local
from pipeproof.foreign.rank import ModulePart, RankMade
from pipeproof.foreign.shared_stages import claims, joined_parts
from pipeproof.observers.calls import Call
from pipeproof.observers.shards import Shard, flat_shard
from pipeproof.pipeline.action import Action
from tests.support.golden import golden
from tests.support.steps import blocks, loss_fn, pairs

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
    (merged,) = [part for one in joined_parts(ranks, replicas) for part in one.parts]
    return [
        (claim.law, claim.rank, claim.seen)
        for claim in claims((0, "w"), 0, merged.members, replicas)
        if not claim.holds
    ]


def test_replicas_are_one_stage_on_the_first_of_their_ranks() -> None:
    first, second = joined_parts([made(part(1, 2)), made(part(1, 2))], TWICE)
    assert (len(first.parts), len(second.parts)) == (1, 0)
    assert (first.share, second.share) == ((0, 2), (1, 3))
    assert broken([made(part(1, 2)), made(part(1, 2))], TWICE) == []


def test_two_copies_in_one_replica_stay_two() -> None:
    assert [len(one.parts) for one in joined_parts([made(part(1, 2)), made(part(1, 2))], ALONE)] == [1, 1]


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (part(1, 3), ("replicas", 1, "another gradient than rank 0's, relative error 0.5")),
        (part(), ("replicas", 1, "no gradient, and rank 0 has one")),
        (part(1, 2, content=b"v"), ("initial-weights", 1, "other weights than rank 0's")),
    ],
)
def test_replicas_that_differ(other: ModulePart, complaint: tuple[str, int, str]) -> None:
    assert broken([made(part(1, 2)), made(other)], TWICE) == [complaint]


def test_zeros_on_one_rank_stand_for_none_on_another() -> None:
    assert broken([made(part(0, 0)), made(part())], TWICE) == broken([made(part()), made(part(0, 0))], TWICE) == []
    ranks = [made(part(0, shard=UPPER)), made(part(shard=LOWER))]
    (whole,) = joined_parts(ranks, ALONE)[0].parts
    assert isinstance(whole.gradients[0], Tensor)
    assert whole.gradients[0].tolist() == [0, 0]
    assert broken(ranks, ALONE) == []


def test_a_stage_that_a_replica_lacks() -> None:
    ((law, rank, told),) = broken([made(part(1, 2)), made()], TWICE)
    assert (law, rank) == ("replicas", 0)
    golden(told)


@pytest.mark.parametrize("replicas", [ALONE, TWICE])
def test_shards_are_gathered(replicas: Replicas) -> None:
    ranks = [made(part(2, shard=LOWER)), made(part(1, shard=UPPER))]
    (whole,) = joined_parts(ranks, replicas)[0].parts
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
def test_shards_that_are_no_whole(parts: tuple[ModulePart, ...], complaint: str) -> None:
    assert broken(list(map(made, parts)), ALONE) == [("shards", 0, complaint)]


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
def test_a_list_says_who_holds_a_stage_where_weights_do_not(
    ranks: list[RankMade], replicas: Replicas, stages: dict[int, str]
) -> None:
    joined = joined_parts(ranks, replicas, {"0": b"a", "1": b"b"})
    found = {k: "".join(str(at) for at, _ in part.members) for k, one in enumerate(joined) for part in one.parts}
    assert found == stages
    if replicas is FOUR and len(stages) == 2 and stages[0] == "01":
        assert [[one.said for one in joined[rank].parts[0].members[1][1].locals] for rank in (0, 2)] == [["0"], ["1"]]


@pytest.mark.parametrize("other", [FLAT, None])
def test_a_part_that_is_left_out_is_no_parameter_that_a_rank_lacks(other: ModulePart | None) -> None:
    ranks = [made(FLAT), made() if other is None else made(replace(other, locals=(Local("v"),)))]
    (merged,) = [part for one in joined_parts(ranks, TWICE) for part in one.parts]
    for k in range(len(merged.locals)):
        assert [one.seen for one in claims((0, "w"), k, merged.members, TWICE) if not one.holds] == []


def test_shards_of_other_peers_are_other_stages() -> None:
    near, far = (part(1, shard=replace(UPPER, peers=peers)) for peers in ((0, 2), (1, 3)))
    assert [len(one.parts) for one in joined_parts([made(near), made(far)], ALONE)] == [1, 1]


def test_calls_of_all_replicas_follow_each_other() -> None:
    def calls(*ends: int) -> tuple[Call, ...]:
        return tuple(Call(True, backwards=[end]) for end in ends)

    first, _ = joined_parts([made(part(1, calls=calls(5, 3))), made(part(1, calls=calls(0, 7)))], TWICE)
    assert [call.backwards for call in first.parts[0].calls or ()] == [[5], [3], [2**32], [2**32 + 7]]


def test_actions_have_the_numbers_of_all_microbatches() -> None:
    _, second = joined_parts([made(), made(actions="0F0 0F1 0B0 0F2")], TWICE)
    assert list(map(str, second.actions or ())) == ["0F1", "0F3", "0B1", "0F-3"]


COUNT = 4


build_model = partial(blocks, 2, width=5)
data = partial(pairs, COUNT, rows=6, width=5, seed=1)


def both_ways(stages: list[nn.Module], microbatches: list[Any], wrong: int | None = None) -> float:
    """Even microbatches enter at rank 0, odd ones at rank 1; each goes through the other rank's second stage.

    Both ranks know the loss of the step. ``wrong``: the microbatch that comes in at twice its size.
    """
    rank, total = dist.get_rank(), torch.zeros(())
    for m, (x, target) in enumerate(microbatches):
        if m % 2 == rank:
            y = stages[0](2 * x if m == wrong else x)
            dist.send(y.detach(), 1 - rank)
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1 - rank)
            y.backward(gradient)
        else:
            received = torch.empty(6, 5)
            dist.recv(received, 1 - rank)
            loss = loss_fn(stages[1](received.requires_grad_()), target) / COUNT
            loss.backward()
            dist.send(received.grad, 1 - rank)
            total += loss.detach()
    dist.all_reduce(total)
    return total.item()


def judged(
    whitebox: WhiteBox,
    *,
    watched: bool,
    summed: tuple[int, ...] = (0, 1),
    held: tuple[int, ...] = (0, 1),
    wrong: int | None = None,
) -> Verdict:
    def step(model: Any, microbatches: list[Any]) -> Any:
        stages = [watch(stage) if watched else stage for stage in model]
        loss = both_ways(stages, microbatches, wrong)
        for stage in summed:
            for parameter in stages[stage].parameters():
                dist.all_reduce(parameter.grad)
        return [stages[stage] for stage in held], loss

    return whitebox.validate(step, reference=build_model, microbatches=data(), ranks=2, loss_fn=loss_fn)


@pytest.mark.parametrize("watched", [True, False])
def test_mirrored_stages_are_replicas(whitebox: WhiteBox, watched: bool) -> None:
    verdict = judged(whitebox, watched=watched)
    assert verdict.verdict == "pass", str(verdict)
    assert verdict.law("replicas").checked == 4


@pytest.mark.parametrize("watched", [True, False])
def test_a_mirrored_stage_that_was_not_summed(whitebox: WhiteBox, watched: bool) -> None:
    (cause,) = judged(whitebox, watched=watched, summed=(0,)).cause
    assert (cause.kind, cause.stage) == ("not-reduced", 1)
    golden(cause.detail)


def test_a_stage_that_all_ranks_hold_while_nobody_holds_another_is_a_wrong_partition(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, watched=False, held=(0,))
    assert verdict.verdict == "fail"
    assert [cause.kind for cause in verdict.cause] == ["partition"]


def test_a_model_that_nobody_cut_is_a_wrong_partition(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        losses = [loss_fn(model(x), target) for x, target in microbatches]
        (sum(losses) / COUNT).backward()
        return model, [loss.item() for loss in losses]

    verdict = whitebox.validate(step, reference=build_model, microbatches=data(), ranks=2, loss_fn=loss_fn)
    assert verdict.verdict == "fail"
    assert [cause.kind for cause in verdict.cause] == ["partition"]


def test_a_copy_that_drifted_from_the_others_is_named_with_its_rank(whitebox: WhiteBox) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        if dist.get_rank() == 1:
            model[1][0].weight.data = model[1][0].weight.data * 1.01
        loss = both_ways(list(model), microbatches, None)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return list(model), loss

    verdict = whitebox.validate(step, reference=build_model, microbatches=data(), ranks=2, loss_fn=loss_fn)
    (cause,) = verdict.cause
    assert (cause.kind, cause.rank, cause.stage, cause.parameter) == ("altered", 1, 1, "1.0.weight"), str(verdict)


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_what_is_wrong_is_on_the_rank_that_the_microbatch_was_on(whitebox: WhiteBox, wrong: int) -> None:
    verdict = judged(whitebox, watched=True, wrong=wrong)
    first = next(one for one in verdict.mismatches if one.law == "boundaries")
    assert (first.rank, first.stage, first.microbatch) == (wrong % 2, 0, wrong), str(verdict)
    assert {cause.rank for cause in verdict.cause if cause.microbatches == (wrong,)} == {wrong % 2}, str(verdict)


def one_linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 6, bias=False)


def rows_by_hand(model: nn.Linear, microbatches: list[Any], alike: bool = False) -> HandedBack:
    """Each rank has half of the rows, in a module of its own. ``alike``: both ranks begin with the first half."""
    first = 3 * dist.get_rank()
    own, rows, losses = nn.Linear(5, 3, bias=False), slice(first, first + 3), []
    own.weight.data = model.weight.data[:3] if alike else model.weight.data[rows]
    for x, target in microbatches:
        loss = (own(x) - target[:, rows]).square().sum() / target.numel()
        (loss / COUNT).backward()
        losses.append(loss.detach())
        dist.all_reduce(losses[-1])
    return HandedBack(own, losses, gradients={"weight": (own.weight.grad, rows)})


@pytest.mark.parametrize("alike", [False, True])
def test_weights_that_are_cut_up_by_hand_are_put_together_as_their_gradients_are(
    whitebox: WhiteBox, alike: bool
) -> None:
    draw = torch.Generator().manual_seed(1)
    pairs_ = [(torch.randn(4, 5, generator=draw), torch.randn(4, 6, generator=draw)) for _ in range(COUNT)]
    verdict = whitebox.validate(
        partial(rows_by_hand, alike=alike), reference=one_linear, microbatches=pairs_, ranks={"tp": 2}, loss_fn=loss_fn
    )
    assert verdict.verdict == ("fail" if alike else "pass"), verdict
    assert (verdict.law("initial-weights").outcome, verdict.law("initial-weights").checked) == (verdict.verdict, 2)
