"""Faults change what they are about, and break no step by looking at it."""

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipeproof.foreign import WhiteBox, under_test
from pipeproof.foreign.mutants import MUTANTS
from pipeproof.foreign.task import WhiteBoxError
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

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


def fails_from(context: RankContext, run: int) -> None:
    os.environ["RUNS"] = runs = os.environ.get("RUNS", "") + "x"  # stays on its rank
    if len(runs) >= run:
        raise AssertionError("once too often")
    closing(context)


def test_a_test_that_fails_before_anything_is_changed_has_caught_nothing() -> None:
    with World() as world:  # its ranks ran nothing yet
        found = WhiteBox(world).mutate(partial(fails_from, run=3), ranks=1, only=["backward-doubled"])
    assert found.tried[0].outcome == "not judged", str(found)
    assert "the test failed before this changed anything: AssertionError: once too often" in str(found)


def test_a_test_that_fails_when_it_runs_again_is_refused() -> None:
    with World() as world, pytest.raises(WhiteBoxError, match=r"fails when it runs again.*once too often"):
        WhiteBox(world).mutate(partial(fails_from, run=2), ranks=1)


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
    hits: list[None] = []
    given = torch.ones(3, 2, WIDTH)
    with MUTANTS["evaluating"].plant(lambda: hits.append(None)):
        module(*[given] * (3 if isinstance(module, nn.MultiheadAttention) else 1))
    assert bool(hits) is drops


@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
def test_an_lstm_of_one_layer_drops_nothing() -> None:
    module, hits = nn.LSTM(WIDTH, WIDTH, dropout=0.5), list[None]()
    with MUTANTS["evaluating"].plant(lambda: hits.append(None)):
        module(torch.ones(3, 2, WIDTH))
    assert not hits
