"""Faults that are planted in a step tell whether its test tests anything."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.foreign import LetPass, WhiteBox, under_test
from pipeproof.foreign.mutants import MUTANTS
from pipeproof.foreign.reference_run import WhiteBoxError
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

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


def test_a_test_that_compares_sees_what_is_planted_and_one_that_does_not_lets_it_pass(world: World) -> None:
    whitebox = WhiteBox(world)
    strict, some = outcomes(whitebox, True), ("gradient-lost", "reduction-left-out", "update-doubled", "evaluating")
    lax = outcomes(whitebox, False, *some)
    assert strict.keys() == MUTANTS.keys()
    planted = {name for name, outcome in strict.items() if outcome != "not planted"}
    assert {name for name in MUTANTS if name not in planted} == {*MESSAGES}, "replicas send no messages"
    assert {name for name in planted if strict[name] == "let pass"} <= {"gradient-rounded", "outputs-rounded"}
    assert lax == dict.fromkeys(some, "let pass")


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


def test_what_hides_a_missing_reduction_is_refused(world: World) -> None:
    with pytest.raises(WhiteBoxError, match="ranks 0, 1 give the same to a sum over them"):
        WhiteBox(world).mutate(partial(replicas, strict=True, same=True), ranks=2, only=["gradient-lost"])


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
