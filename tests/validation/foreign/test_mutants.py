"""Faults change what they are about, and break no step by looking at it."""

import os
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipeproof.foreign import WhiteBox, under_test
from pipeproof.foreign.mutants import MUTANTS
from pipeproof.foreign.planted import Planted
from pipeproof.foreign.task import WhiteBoxError
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden

WIDTH = 4


def untested(model_: nn.Module, given: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """A step of which nothing is compared."""

    def closure() -> float:
        optimizer.zero_grad()
        loss = model_(given).square().mean()
        loss.backward()
        return float(loss.detach())

    with under_test():
        optimizer.step(closure)


def sparse(context: RankContext) -> None:
    table = nn.Sequential(nn.Embedding(5, WIDTH, sparse=True), nn.Tanh())
    untested(table, torch.arange(3), torch.optim.SGD(table.parameters(), lr=0.1))


def closing(context: RankContext) -> None:
    stage = nn.Linear(WIDTH, WIDTH)
    untested(stage, torch.ones(2, WIDTH), torch.optim.LBFGS(stage.parameters(), lr=0.1))


def cut(context: RankContext) -> None:
    stage = nn.Linear(WIDTH, WIDTH)
    fully_shard(stage, mesh=init_device_mesh("cpu", (context.ranks,)))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    with under_test():
        stage(torch.ones(2, WIDTH)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.01)
        optimizer.step()


@pytest.mark.parametrize(
    ("test", "ranks", "only"),
    [
        (sparse, 1, ["gradient-lost", "gradient-turned", "gradient-doubled"]),
        (closing, 1, ["update-doubled"]),
        (cut, 2, ["clipping-left-out", "norm-doubled", "update-left-out", "update-doubled"]),
    ],
)
def test_what_a_fault_looks_at_breaks_no_step(
    world: World, test: Callable[[RankContext], None], ranks: int, only: list[str]
) -> None:
    """Sparse gradients, an optimizer that wants a closure, parts of which other ranks have the rest."""
    found = WhiteBox(world).mutate(test, ranks=ranks, only=only)
    assert {one.outcome for one in found.tried} == {"let pass"}, str(found)


def fails_from(context: RankContext, run: int, how: Callable[[str], object]) -> None:
    os.environ["RUNS"] = runs = os.environ.get("RUNS", "") + "x"  # stays on its rank, which ends with a failure
    if len(runs) >= run:
        how("once too often")
    closing(context)


def asserts(why: str) -> None:
    raise AssertionError(why)


@pytest.mark.parametrize(
    "how", [asserts, pytest.fail, pytest.skip, sys.exit], ids=["raises", "fails", "skips", "exits"]
)
def test_a_test_that_ends_before_anything_is_changed_has_caught_nothing(
    world: World, how: Callable[[str], object]
) -> None:
    found = WhiteBox(world).mutate(partial(fails_from, run=3, how=how), ranks=1, only=["backward-doubled"])
    assert found.tried[0].outcome == "not judged", str(found)
    golden("\n".join(tried.how for tried in found.tried))


def skips(context: RankContext) -> None:
    stage = nn.Linear(WIDTH, WIDTH)
    with under_test():
        stage(torch.ones(2, WIDTH)).sum().backward()
    if context.rank and stage.bias.grad is not None and stage.bias.grad.sum() != 2 * WIDTH:
        pytest.skip("other gradients than usual")


def test_a_test_that_skips_has_caught_nothing(world: World) -> None:
    found = WhiteBox(world).mutate(skips, ranks=2, only=["flow-doubled"])
    assert [one.outcome for one in found.tried] == ["not judged"], str(found)


OF_THE_MODULE = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))


def of_the_module(context: RankContext) -> None:
    with under_test():
        OF_THE_MODULE(torch.ones(2, WIDTH))


def left_there(context: RankContext) -> tuple[float, bool]:
    return float(OF_THE_MODULE[0].weight.sum()), OF_THE_MODULE[1].training


def test_a_model_that_is_there_after_the_test_is_as_it_was(world: World) -> None:
    before = world.run(left_there, ranks=1)
    found = WhiteBox(world).mutate(of_the_module, ranks=1, only=["weight-nudged", "evaluating"])
    assert {one.outcome for one in found.tried} == {"let pass"}, str(found)
    assert world.run(left_there, ranks=1) == before


def in_two_types(context: RankContext) -> None:
    """Sends a message, and then another of its shape and of another type, and does a backward that adds nothing."""
    layer = nn.Linear(WIDTH, WIDTH)
    with under_test():
        for number, dtype in enumerate((torch.float32, torch.bfloat16)):
            one = torch.full((WIDTH,), 1.0 + number, dtype=dtype)
            dist.send(one, 1) if context.rank == 0 else dist.recv(one, 0)
            out = layer(torch.ones(2, WIDTH))
            out.backward((1 - number) * torch.ones_like(out))


def test_what_has_another_type_or_adds_nothing_is_no_fault(world: World) -> None:
    found = WhiteBox(world).mutate(in_two_types, ranks=2, only=["message-repeated", "backward-left-out"])
    assert {one.outcome for one in found.tried} == {"not planted"}, str(found)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1 + 2j]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_complex_gradients_are_rounded_in_both_parts() -> None:
    layer, given = Complex(), torch.tensor([1.001 - 1.002j])
    with MUTANTS["gradient-rounded"].plant(Planted()):
        layer(given).real.sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(torch.view_as_real(layer.weight.grad), torch.tensor([[1.0, 1.0]]))


def test_a_test_that_fails_when_it_runs_again_is_refused(world: World) -> None:
    with pytest.raises(WhiteBoxError, match=r"fails when it runs again.*once too often"):
        WhiteBox(world).mutate(partial(fails_from, run=2, how=asserts), ranks=1)


@pytest.mark.parametrize(
    ("module", "drops"),
    [
        (nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5), True),
        (nn.LSTM(WIDTH, WIDTH, num_layers=2), False),
        (nn.MultiheadAttention(WIDTH, 1, dropout=0.5), True),
        (nn.MultiheadAttention(WIDTH, 1), False),
    ],
)
def test_dropouts_of_other_layers_are_off_where_they_drop_anything(module: nn.Module, drops: bool) -> None:
    planted = Planted()
    given = torch.ones(3, 2, WIDTH)
    with MUTANTS["evaluating"].plant(planted):
        module(*[given] * (3 if isinstance(module, nn.MultiheadAttention) else 1))
    assert bool(planted.hits) is drops


@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
def test_an_lstm_of_one_layer_drops_nothing() -> None:
    module, planted = nn.LSTM(WIDTH, WIDTH, dropout=0.5), Planted()
    with MUTANTS["evaluating"].plant(planted):
        module(torch.ones(3, 2, WIDTH))
    assert not planted.hits
