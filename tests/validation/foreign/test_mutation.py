"""Faults that are planted in a step tell whether its test tests anything."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import SkipTest

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.foreign import LetPass, WhiteBox, under_test
from pipeproof.foreign.mutants import MUTANTS
from pipeproof.foreign.reductions import is_sum
from pipeproof.foreign.task import WhiteBoxError
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.sweeps import some

WIDTH, ROWS = 4, 8
LOSS = nn.functional.mse_loss
MESSAGES = [name for name in MUTANTS if name.startswith("message-")]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def data(replica: int, same: bool = False) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0 if same else replica)
    return [(torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)) for _ in range(2)]


def clipped(stage: nn.Module) -> float:
    return float(torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.1))


def replicas(context: RankContext, strict: bool, same: bool = False) -> None:
    """Two replicas of a whole model; gradients are averaged by hand. Then they are compared, or hardly anything is."""
    stage = model()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.5)
    norms = []
    with under_test():
        for _ in range(2):
            optimizer.zero_grad()
            for x, target in data(context.rank, same):
                (LOSS(stage(x), target) / 2).backward()
            for parameter in stage.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= context.ranks
            norms.append(clipped(stage))
            optimizer.step()
    twin = model()
    expected = []
    for _ in range(2):
        twin.zero_grad()
        sums = [torch.zeros_like(one) for one in twin.parameters()]
        for replica in range(context.ranks):
            for x, target in data(replica, same):
                loss = LOSS(twin(x), target) / 2 / context.ranks
                for total, one in zip(sums, torch.autograd.grad(loss, list(twin.parameters())), strict=True):
                    total += one
        norm = torch.stack([one.norm() for one in sums]).norm()
        expected.append(float(norm))
        for parameter, total in zip(twin.parameters(), sums, strict=True):
            parameter.data -= 0.5 * total * min(1.0, 0.1 / (float(norm) + 1e-6))
    if strict:
        torch.testing.assert_close(norms, expected)
        for one, other in zip(stage.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    assert all(norm > 0 for norm in norms)


def outcomes(whitebox: WhiteBox, strict: bool, *only: str) -> dict[str, str]:
    found = whitebox.mutate(partial(replicas, strict=strict), ranks=2, only=only, timeout_s=20)
    return {one.name: one.outcome for one in found.tried}


LAX = ("gradient-lost", "reduction-left-out", "update-doubled", "evaluating")


@pytest.mark.parametrize("names", some([[*MUTANTS][::3], [*MUTANTS]], left=[[*MUTANTS]]), ids=["some", "all"])
def test_a_test_that_compares_sees_what_is_planted_and_one_that_does_not_lets_it_pass(
    names: list[str], world: World
) -> None:
    whitebox = WhiteBox(world)
    strict, lax = outcomes(whitebox, True, *names), outcomes(whitebox, False, *LAX)
    assert strict.keys() == {*names}
    planted = {name for name, outcome in strict.items() if outcome != "not planted"}
    assert {*names} - planted == {*MESSAGES} & {*names}, "replicas send no messages"
    assert {name for name in planted if strict[name] == "let pass"} <= {"gradient-rounded", "outputs-rounded"}
    assert lax == dict.fromkeys(LAX, "let pass")


def pipeline(context: RankContext, strict: bool) -> None:
    """Two stages by hand; the gradients are compared, or nothing is."""
    whole = model()
    stage = whole[:2] if context.rank == 0 else whole[2:]
    seen: list[Tensor] = []
    with under_test():
        for x, target in data(0):
            if context.rank == 0:
                out = stage(x)
                dist.send(out.detach(), 1)
                flow = torch.empty(ROWS, WIDTH)
                dist.recv(flow, 1)
                out.backward(flow)
            else:
                x = torch.empty(ROWS, WIDTH)
                dist.recv(x, 0)
                LOSS(stage(x.requires_grad_()), target).backward()
                assert x.grad is not None
                dist.send(x.grad, 0)
        seen += [one.grad for one in stage.parameters() if one.grad is not None]
    twin = model()
    for x, target in data(0):
        LOSS(twin(x), target).backward()
    own = twin[:2] if context.rank == 0 else twin[2:]
    for one, due in zip(seen, own.parameters(), strict=True) if strict else ():
        torch.testing.assert_close(one, due.grad)


def test_messages_are_changed_on_their_way(world: World) -> None:
    whitebox = WhiteBox(world)
    strict = whitebox.mutate(partial(pipeline, strict=True), ranks=2, only=MESSAGES, timeout_s=20)
    lax = whitebox.mutate(partial(pipeline, strict=False), ranks=2, only=MESSAGES, timeout_s=20)
    assert {one.outcome for one in strict.tried} == {"caught"}, str(strict)
    assert {one.outcome for one in lax.tried} == {"let pass"}, str(lax)
    strict.raise_if_any_passed()
    with pytest.raises(LetPass, match=r"let pass +message-zero +a message is zeros"):
        lax.raise_if_any_passed()


def test_with_the_same_data_everywhere_only_faults_in_sums_are_not_judged(world: World) -> None:
    test, only = partial(replicas, strict=True, same=True), ["gradient-lost", "reduction-left-out", "reduction-lost"]
    found = WhiteBox(world).mutate(test, ranks=2, only=only, timeout_s=20)
    assert {one.name: one.outcome for one in found.tried} == {
        "gradient-lost": "caught",
        "reduction-left-out": "not judged",
        "reduction-lost": "not judged",
    }
    golden(str(found), lines="^not judged")
    with pytest.raises(LetPass, match="give each replica data of its own"):
        found.raise_if_any_passed()


def unmarked(context: RankContext) -> None:
    """Does not say where its step runs, and gives the same to a sum."""
    dist.all_reduce(torch.ones(3))


def test_where_nothing_is_judged_nothing_is_known(world: World) -> None:
    found = WhiteBox(world).mutate(unmarked, ranks=2, only="reduction-doubled")
    assert str(found).splitlines()[-1] == "1 not judged"
    with pytest.raises(LetPass):
        found.raise_if_any_passed()


def summed_before(context: RankContext) -> None:
    """Gives the same to a sum before its step, in which there is none."""
    dist.all_reduce(torch.ones(3))
    with under_test():
        """Here nothing is summed."""


def test_what_is_the_same_before_the_step_is_no_matter(world: World) -> None:
    found = WhiteBox(world).mutate(summed_before, ranks=2, only=["reduction-left-out"], timeout_s=20)
    assert [one.outcome for one in found.tried] == ["not planted"], str(found)


def averaged_first(context: RankContext) -> None:
    """Averages weights that are the same before its step, in which one of the sums is the same everywhere."""
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    dist.all_reduce(layer.weight.data)
    x = torch.full((ROWS, WIDTH), 1.0 + context.rank)
    with under_test():
        layer(x).mean().backward()
        for parameter in layer.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
    assert layer.bias.grad is not None
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, 3 * layer.bias.grad / 2 * torch.ones(WIDTH, WIDTH))


def test_what_is_the_same_elsewhere_or_now_and_then_hides_nothing(world: World) -> None:
    found = WhiteBox(world).mutate(averaged_first, ranks=2, only=["reduction-left-out"], timeout_s=20)
    assert [one.outcome for one in found.tried] == ["caught"], str(found)


CHANGES_NOTHING = "evaluating weight-nudged outputs-rounded norm-doubled update-doubled flow-doubled backward-doubled"


def still(context: RankContext, alive: tuple[int, ...]) -> None:
    """A step in which all is zero, but on ranks that are ``alive``."""
    lives = context.rank in alive
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH, track_running_stats=lives)
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Dropout(0.5 if lives else 0.0))
    for parameter in () if lives else stage.parameters():
        parameter.data.zero_()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.5)
    with under_test():
        out = stage(data(0)[0][0])
        out.backward(out.detach())
        clipped(stage)
        optimizer.step()


@pytest.mark.parametrize(
    ("alive", "outcome"), [((), ("not planted", None)), ((0,), ("let pass", 0)), ((0, 1), ("let pass", 1))]
)
def test_a_fault_counts_where_it_changes_anything(
    world: World, alive: tuple[int, ...], outcome: tuple[str, int | None]
) -> None:
    found = WhiteBox(world).mutate(partial(still, alive=alive), ranks=2, only=CHANGES_NOTHING.split(), timeout_s=20)
    assert {one.name: (one.outcome, one.rank) for one in found.tried} == dict.fromkeys(CHANGES_NOTHING.split(), outcome)


def begins_with_zeros(context: RankContext) -> None:
    """A layer of zeros comes first."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for parameter in layers[0].parameters():
        parameter.data.zero_()
    before = [one.detach().clone() for one in layers.parameters()]
    with under_test():
        layers(torch.ones(ROWS, WIDTH))
    assert all(map(torch.equal, layers.parameters(), before)), "a weight is another"


def test_the_weight_that_is_nudged_is_one_that_can_be(world: World) -> None:
    found = WhiteBox(world).mutate(begins_with_zeros, ranks=1, only=["weight-nudged"], timeout_s=20)
    assert [one.outcome for one in found.tried] == ["caught"]


def overlapping(context: RankContext, *, future: bool, strict: bool) -> None:
    """Rank 0 begins a sum, and sends what rank 1 needs to get there before it waits."""
    given, got = torch.ones(WIDTH) * (1 + context.rank), torch.zeros(2)
    with under_test():
        if context.rank == 0:
            work = dist.all_reduce(given, async_op=True)
            dist.send(torch.ones(2), 1)
            work.get_future().wait() if future else work.wait()
            assert future or work.is_completed()
        else:
            dist.recv(got, 0)
            dist.all_reduce(given)
    assert not strict or torch.equal(given, torch.full((WIDTH,), 3.0))


@pytest.mark.parametrize("future", [False, True])
@pytest.mark.parametrize(("strict", "outcome"), [(False, "let pass"), (True, "caught")])
def test_a_sum_is_changed_when_the_step_waits_for_it(world: World, *, future: bool, strict: bool, outcome: str) -> None:
    test, only = partial(overlapping, future=future, strict=strict), ["reduction-left-out", "reduction-doubled"]
    found = WhiteBox(world).mutate(test, ranks=2, only=only, timeout_s=10)
    assert [one.outcome for one in found.tried] == [outcome] * 2, str(found)
    assert not strict or all("raised AssertionError" in one.how for one in found.tried), str(found)


def of_a_leaf(context: RankContext) -> None:
    """A sum over what wants a gradient."""
    parameter = nn.Parameter(torch.full((WIDTH,), 1.0 + context.rank))
    with under_test():
        dist.all_reduce(parameter)


def greatest(context: RankContext) -> None:
    """No sum, but a reduction."""
    with under_test():
        dist.all_reduce(torch.arange(4.0) + context.rank, op=dist.ReduceOp.MAX)


@pytest.mark.parametrize(("test", "outcome"), [(of_a_leaf, "let pass"), (greatest, "not planted")])
def test_a_fault_in_sums_breaks_no_leaf_and_leaves_other_reductions(
    world: World, test: Callable[[RankContext], None], outcome: str
) -> None:
    names = [name for name in MUTANTS if name.startswith("reduction-")]
    found = WhiteBox(world).mutate(test, ranks=2, only=names, timeout_s=20)
    assert {one.name: one.outcome for one in found.tried} == dict.fromkeys(names, outcome), str(found)


@pytest.mark.parametrize(
    ("given", "sums"),
    [
        ((), True),
        ((dist.ReduceOp.AVG,), True),
        ((dist.ReduceOp.MAX,), False),
        ((dist.ReduceOp(dist.ReduceOp.MIN),), False),
    ],
)
def test_sums_and_averages_are_sums(given: tuple[object, ...], sums: bool) -> None:
    assert is_sum([torch.ones(2)], *given) == sums
    assert not is_sum(torch.ones(2, dtype=torch.int64), *given), "not of integers"


def test_one_name_may_be_given_bare(world: World) -> None:
    assert [one.name for one in WhiteBox(world).mutate(idle, ranks=1, only="gradient-lost").tried] == ["gradient-lost"]


@pytest.mark.parametrize(
    ("test", "ranks", "only", "told"),
    [
        (5, 2, (), "test is 5: expected what can be called with a RankContext"),
        (id, "2", (), "ranks is '2': expected a number of ranks, at least 1"),
        (id, 0, (), "ranks is 0: expected a number of ranks, at least 1"),
        (id, True, (), "ranks is True: expected"),
        (id, 2, [3], "unknown fault 3: expected a name such as message-zero"),
        (id, 2, "xyzzy", "unknown fault 'xyzzy': expected a name such as message-zero"),
        (id, 2, 3, "only is 3: expected names of faults, such as 'message-zero'"),
    ],
)
def test_what_cannot_be_asked_is_told(world: World, test: Any, ranks: Any, only: Any, told: str) -> None:
    with pytest.raises(WhiteBoxError, match=told):
        WhiteBox(world).mutate(test, ranks=ranks, only=only)


def fails(context: RankContext) -> None:
    assert context.rank == 0, "as it is"


def test_a_test_that_fails_anyway_tells_nothing(world: World) -> None:
    with pytest.raises(
        WhiteBoxError, match=r"the test fails as it is, with no fault planted: rank 1 raised .*as it is"
    ):
        WhiteBox(world).mutate(fails, ranks=2)


def test_an_unknown_fault_is_told_with_the_nearest(world: World) -> None:
    with pytest.raises(WhiteBoxError, match=r"unknown fault 'message-zeros'.*message-zero"):
        WhiteBox(world).mutate(fails, ranks=2, only=["message-zeros"])


def idle(context: RankContext) -> None:
    """Does nothing that a fault could be in."""


def test_where_nothing_could_be_planted_nothing_is_known(world: World) -> None:
    found = WhiteBox(world).mutate(idle, ranks=2, only=["gradient-lost", "message-zero"])
    assert str(found).splitlines()[-1] == "2 not planted"
    with pytest.raises(LetPass):
        found.raise_if_any_passed()


def test_nothing_is_left_behind(world: World) -> None:
    world.run(partial(replicas, strict=True), ranks=2)


def skips(context: RankContext, how: Callable[[str], Any]) -> None:
    """A test that skips where a gradient is odd, on every rank."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    layer(torch.ones(1, WIDTH)).sum().backward()
    assert layer.weight.grad is not None
    whole = layer.weight.grad.clone()
    dist.all_reduce(whole)
    if not torch.equal(whole, torch.full((WIDTH, WIDTH), float(context.ranks))):
        how("odd numbers")


def raises_skip(why: str) -> None:
    raise SkipTest(why)


@pytest.mark.parametrize("how", [pytest.skip, raises_skip])
def test_a_test_that_skips_on_all_ranks_under_a_fault_has_not_judged_it(
    whitebox: WhiteBox, how: Callable[[str], Any]
) -> None:
    (tried,) = whitebox.mutate(partial(skips, how=how), ranks=2, only=["gradient-doubled"]).tried
    assert tried.outcome == "not judged", tried
    golden(re.sub(r"rank \d", "rank #", tried.how))
