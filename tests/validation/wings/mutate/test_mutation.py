"""Faults that are planted in a step tell whether its test tests anything."""

import os
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.whitebox.task import WhiteBoxError
from pipeproof.wings.mutate import LetPass, Mutated, mutate, mutate_step, under_test
from pipeproof.wings.mutate.mutants import MUTANTS
from pipeproof.wings.mutate.mutation import Tried
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.steps import backward, pairs, sgd
from tests.support.sweeps import some
from tests.support.two_ranks import half, one_by_one
from tests.support.verdicts import FAILED, PASSED

WIDTH, ROWS = 4, 8
MESSAGES = [name for name in MUTANTS if name.startswith("message-")]
Mutate = Callable[..., Mutated]


@pytest.fixture
def mutated(world: World) -> Mutate:
    """``mutate`` on the ranks of the world, two unless it is said, with a bound."""
    return partial(mutate, ranks=2, whitebox=WhiteBox(world, timeout_s=20))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


data = partial(pairs, 2, rows=ROWS, width=WIDTH)


def clipped(stage: nn.Module) -> float:
    return float(torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.1))


def replicas(context: RankContext, strict: bool, same: bool = False) -> None:
    """Two replicas of a whole model; gradients are averaged by hand. Then they are compared, or hardly anything is."""
    own = [data(seed=0 if same else replica) for replica in range(context.ranks)]
    stage, twin = model(), model()
    optimizer, norms, expected = sgd(stage, 0.5), [], []
    with under_test():
        for _ in range(2):
            optimizer.zero_grad()
            backward(stage, own[context.rank])
            for parameter in stage.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= context.ranks
            norms.append(clipped(stage))
            optimizer.step()
    plain = sgd(twin, 0.5)
    for _ in range(2):
        plain.zero_grad()
        backward(twin, [*chain.from_iterable(own)])
        expected.append(clipped(twin))
        plain.step()
    if strict:
        torch.testing.assert_close(norms, expected)
        torch.testing.assert_close([*stage.parameters()], [*twin.parameters()])
    assert all(norm > 0 for norm in norms)


def outcomes(mutated: Mutate, strict: bool, *only: str) -> dict[str, str]:
    return {one.name: one.outcome for one in mutated(partial(replicas, strict=strict), only=only).tried}


LAX = ("gradient-lost", "reduction-left-out", "update-doubled", "evaluating")


@pytest.mark.parametrize("names", some([[*MUTANTS][::3], [*MUTANTS]], left=[[*MUTANTS]]), ids=["some", "all"])
def test_a_test_that_compares_sees_what_is_planted_and_one_that_does_not_lets_it_pass(
    names: list[str], mutated: Mutate, world: World
) -> None:
    strict, lax = outcomes(mutated, True, *names), outcomes(mutated, False, *LAX)
    assert strict.keys() == {*names}
    planted = {name for name, outcome in strict.items() if outcome != "not planted"}
    assert {*names} - planted == {*MESSAGES} & {*names}, "replicas send no messages"
    assert {name for name in planted if strict[name] == "let pass"} <= {"gradient-rounded", "outputs-rounded"}
    assert lax == dict.fromkeys(LAX, "let pass")
    world.run(partial(replicas, strict=True), ranks=2)  # nothing is left behind


def pipeline(context: RankContext, strict: bool) -> None:
    """Two stages by hand; the gradients are compared, or nothing is."""
    whole, twin = model(), model()
    with under_test():
        one_by_one(half(whole), data())
    backward(twin, data())
    for one, expected in zip(half(whole).parameters(), half(twin).parameters(), strict=True) if strict else ():
        torch.testing.assert_close(one.grad, expected.grad)


def test_messages_are_changed_on_their_way(mutated: Mutate) -> None:
    strict, lax = (mutated(partial(pipeline, strict=strict), only=MESSAGES) for strict in (True, False))
    assert {one.outcome for one in strict.tried} == {"caught"}, str(strict)
    assert {one.outcome for one in lax.tried} == {"let pass"}, str(lax)
    strict.raise_if_any_passed()
    with pytest.raises(LetPass, match=r"let pass +message-zero +a message is zeros"):
        lax.raise_if_any_passed()


def test_with_the_same_data_everywhere_only_faults_in_sums_are_not_judged(mutated: Mutate) -> None:
    only = ["gradient-lost", "reduction-left-out", "reduction-lost"]
    found = mutated(partial(replicas, strict=True, same=True), only=only)
    assert [one.outcome for one in found.tried] == ["not judged", "not judged", "caught"], str(found)
    golden(str(found), lines="^not judged")
    with pytest.raises(LetPass, match="give each replica data of its own"):
        found.raise_if_any_passed()


def unmarked(context: RankContext) -> None:
    """Does not say where its step runs, and gives the same to a sum."""
    dist.all_reduce(torch.ones(3))


def idle(context: RankContext) -> None:
    """Does nothing that a fault could be in."""


def summed_before(context: RankContext) -> None:
    """Gives the same to a sum before its step, in which there is none."""
    dist.all_reduce(torch.ones(3))
    with under_test():
        """Here nothing is summed."""


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


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("test", "only"),
    [
        (unmarked, "reduction-doubled"),
        (idle, "gradient-lost"),
        (idle, ["gradient-lost", "message-zero"]),
        (summed_before, "reduction-left-out"),
        (averaged_first, "reduction-left-out"),
    ],
    ids=["not judged", "one name", "not planted", "the same elsewhere", "the same now and then"],
)
def test_what_nothing_caught_is_not_known(test: Any, only: Any, mutated: Mutate) -> None:
    found = mutated(test, only=only)
    golden(re.sub(r"rank \d raised .*", "rank # raised", str(found)))
    with nullcontext() if test is averaged_first else pytest.raises(LetPass):
        found.raise_if_any_passed()


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
        out = stage(data()[0][0])
        out.backward(out.detach())
        clipped(stage)
        optimizer.step()


@pytest.mark.parametrize(
    ("alive", "outcome"), [((), ("not planted", None)), ((0,), ("let pass", 0)), ((0, 1), ("let pass", 1))]
)
def test_a_fault_counts_where_it_changes_anything(
    alive: tuple[int, ...], outcome: tuple[str, int | None], mutated: Mutate
) -> None:
    found = mutated(partial(still, alive=alive), only=CHANGES_NOTHING.split())
    assert {one.name: (one.outcome, one.rank) for one in found.tried} == dict.fromkeys(CHANGES_NOTHING.split(), outcome)


def fails(context: RankContext) -> None:
    assert context.rank == 0, "as it is"


def fails_from(context: RankContext, run: int, how: Callable[[str], object]) -> None:
    os.environ["RUNS"] = runs = os.environ.get("RUNS", "") + "x"  # stays on its rank, which ends with a failure
    if len(runs) >= run:
        how("once too often")
    with under_test():
        nn.Linear(WIDTH, WIDTH)(torch.ones(2, WIDTH)).sum().backward()


def asserts(why: str) -> None:
    raise AssertionError(why)


@pytest.mark.parametrize(
    ("test", "asked", "words"),
    [
        (5, {}, "test is 5: expected what can be called with a RankContext"),
        (id, {"ranks": "2"}, "ranks is '2': expected a number of ranks, at least 1"),
        (id, {"ranks": 0}, "ranks is 0: expected a number of ranks, at least 1"),
        (id, {"ranks": True}, "ranks is True: expected"),
        (id, {"only": [3]}, "unknown fault 3: expected a name such as message-zero"),
        (id, {"only": "xyzzy"}, "unknown fault 'xyzzy': expected a name such as message-zero"),
        (id, {"only": ["message-zeros"]}, r"unknown fault 'message-zeros'.*message-zero"),
        (id, {"only": 3}, "only is 3: expected names of faults, such as 'message-zero'"),
        (fails, {}, r"the test fails as it is, with no fault planted: rank 1 raised .*as it is"),
        (partial(fails_from, run=2, how=asserts), {"ranks": 1}, r"fails when it runs again.*once too often"),
    ],
)
def test_what_cannot_be_asked_is_said(test: Any, asked: dict[str, Any], words: str, mutated: Mutate) -> None:
    with pytest.raises(WhiteBoxError, match=words):
        mutated(test, **asked)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "how", [asserts, pytest.fail, pytest.skip, sys.exit], ids=["raises", "fails", "skips", "exits"]
)
def test_a_test_that_ends_before_anything_is_changed_has_caught_nothing(
    how: Callable[[str], object], mutated: Mutate
) -> None:
    (tried,) = mutated(partial(fails_from, run=3, how=how), ranks=1, only=["backward-doubled"]).tried
    assert tried.outcome == "not judged", tried
    golden(tried.how)


def skips(context: RankContext, how: Callable[[str], Any], alone: bool = False) -> None:
    """A test that skips where a gradient is odd, on every rank, or on rank 1 ``alone``."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    layer(torch.ones(1, WIDTH)).sum().backward()
    whole = layer.weight.grad.clone()
    dist.all_reduce(whole)
    odd = not torch.equal(whole, torch.full((WIDTH, WIDTH), float(context.ranks)))
    if odd and (context.rank or not alone):
        how("odd numbers")


def raises_skip(why: str) -> None:
    raise SkipTest(why)


@pytest.mark.parametrize(
    ("how", "alone"),
    [(pytest.skip, False), (raises_skip, False), (pytest.skip, True)],
    ids=["pytest", "unittest", "one"],
)
def test_a_test_that_skips_under_a_fault_has_not_judged_it(
    how: Callable[[str], Any], alone: bool, whitebox: Any
) -> None:
    """By the fixture of pytest, whose test would be skipped, too."""
    test = partial(skips, how=how, alone=alone)
    (tried,) = whitebox.mutate(test, ranks=2, only=["gradient-doubled"]).tried
    assert tried.outcome == "not judged", tried
    golden(re.sub(r"rank \d", "rank #", tried.how))


UNKNOWN = replace(PASSED, outcome="unknown", ended="")


def tried(
    verdict: Verdict, *, changes: int | None, name: str = "gradient-lost", ranks: int = 3
) -> tuple[Tried, list[Any]]:
    """What is said of a fault that changes something on one rank alone (None: on none), and where it was planted."""
    asked = []

    def judge(planted: Any) -> Verdict:
        asked.append(planted.rank)
        if planted.rank in (None, changes) and changes is not None:
            Path(planted.folder, str(changes)).touch()
        return verdict

    (one,) = mutate_step(lambda model, microbatches: None, judge, ranks=ranks, only=[name])
    return one, asked


@pytest.mark.parametrize(
    ("verdict", "changes", "outcome", "ranks"),
    [
        (FAILED, 2, "caught", [2]),
        (FAILED, 0, "caught", [2, 1, 0]),
        (PASSED, 1, "let pass", [2, 1]),
        (UNKNOWN, 2, "not judged", [2]),
        (replace(UNKNOWN, ended="hang"), 2, "caught", [2]),
        (replace(UNKNOWN, ended="error"), 2, "caught", [2]),
        (PASSED, None, "not planted", [2, 1, 0]),
        (FAILED, None, "not planted", [2, 1, 0]),
    ],
)
def test_a_fault_is_caught_by_a_fail_alone(
    verdict: Verdict, changes: int | None, outcome: str, ranks: list[int]
) -> None:
    one, asked = tried(verdict, changes=changes)
    assert (one.outcome, asked) == (outcome, ranks)
    assert one.rank == (changes if outcome != "not planted" else None)


def test_a_fault_in_sums_is_planted_on_all_ranks_at_once() -> None:
    one, asked = tried(FAILED, changes=0, name="reduction-doubled")
    assert (one.outcome, one.rank, asked) == ("caught", None, [None])
