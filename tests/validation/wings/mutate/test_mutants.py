"""Faults change what they are about, and break no step by looking at it."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipeproof.whitebox import WhiteBox
from pipeproof.wings.mutate import mutate, under_test
from pipeproof.wings.mutate.mutants import MUTANTS
from pipeproof.wings.mutate.planting import Planting
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

WIDTH, ROWS = 4, 8
Test = Callable[[RankContext], object]


def untested(model: nn.Module, given: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """A step of which nothing is compared."""

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(given).square().mean()
        loss.backward()
        return float(loss.detach())

    with under_test():
        optimizer.step(closure)


def sparse(context: RankContext) -> None:
    table = nn.Sequential(nn.Embedding(5, WIDTH, sparse=True), nn.Tanh())
    untested(table, torch.arange(3), torch.optim.SGD(table.parameters(), lr=0.1))


def closing(context: RankContext) -> None:
    """An optimizer that wants a closure."""
    stage = nn.Linear(WIDTH, WIDTH)
    untested(stage, torch.ones(2, WIDTH), torch.optim.LBFGS(stage.parameters(), lr=0.1))


def sharded(context: RankContext) -> None:
    """Parameters of which other ranks have the rest."""
    stage = nn.Linear(WIDTH, WIDTH)
    fully_shard(stage, mesh=init_device_mesh("cpu", (context.ranks,)))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    with under_test():
        stage(torch.ones(2, WIDTH)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.01)
        optimizer.step()


def in_two_types(context: RankContext) -> None:
    """Sends a message, and then another of its shape and of another type, and does a backward that adds nothing."""
    layer = nn.Linear(WIDTH, WIDTH)
    with under_test():
        for number, dtype in enumerate((torch.float32, torch.bfloat16)):
            one = torch.full((WIDTH,), 1.0 + number, dtype=dtype)
            dist.send(one, 1) if context.rank == 0 else dist.recv(one, 0)
            out = layer(torch.ones(2, WIDTH))
            out.backward((1 - number) * torch.ones_like(out))


def begins_with_zeros(context: RankContext) -> None:
    """The weight that is nudged is one that can be: a layer of zeros comes first."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for parameter in layers[0].parameters():
        parameter.data.zero_()
    before = [one.detach().clone() for one in layers.parameters()]
    with under_test():
        layers(torch.ones(ROWS, WIDTH))
    assert all(map(torch.equal, layers.parameters(), before)), "a weight is another"


def of_a_leaf(context: RankContext) -> None:
    """A sum over what wants a gradient."""
    parameter = nn.Parameter(torch.full((WIDTH,), 1.0 + context.rank))
    with under_test():
        dist.all_reduce(parameter)


def greatest(context: RankContext) -> None:
    """No sum, but a reduction."""
    with under_test():
        dist.all_reduce(torch.arange(4.0) + context.rank, op=dist.ReduceOp.MAX)


SUMS = "reduction-left-out reduction-doubled reduction-halved reduction-lost"
OUTCOMES: list[tuple[Test, int, str, str]] = [
    (sparse, 1, "gradient-lost gradient-turned gradient-doubled", "let pass"),
    (closing, 1, "update-doubled", "let pass"),
    (sharded, 2, "clipping-left-out norm-doubled update-left-out update-doubled", "let pass"),
    (in_two_types, 2, "message-repeated backward-left-out", "not planted"),
    (begins_with_zeros, 1, "weight-nudged", "caught"),
    (of_a_leaf, 2, SUMS, "let pass"),
    (greatest, 2, SUMS, "not planted"),
]


@pytest.mark.parametrize(("test", "ranks", "only", "outcome"), OUTCOMES, ids=[one[0].__name__ for one in OUTCOMES])
def test_what_becomes_of_a_fault(test: Test, ranks: int, only: str, outcome: str, world: World) -> None:
    found = mutate(test, ranks=ranks, only=only.split(), timeout_s=20, whitebox=WhiteBox(world))
    assert {one.name: one.outcome for one in found.tried} == dict.fromkeys(only.split(), outcome), str(found)


OF_THE_MODULE = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))


def of_the_module(context: RankContext) -> None:
    with under_test():
        OF_THE_MODULE(torch.ones(2, WIDTH))


def left_there(context: RankContext) -> tuple[float, bool]:
    return float(OF_THE_MODULE[0].weight.sum()), OF_THE_MODULE[1].training


@pytest.mark.sweep
def test_a_model_that_is_there_after_the_test_is_as_it_was(world: World) -> None:
    before = world.run(left_there, ranks=1)
    found = mutate(of_the_module, ranks=1, only=["weight-nudged", "evaluating"], whitebox=WhiteBox(world))
    assert {one.outcome for one in found.tried} == {"let pass"}, str(found)
    assert world.run(left_there, ranks=1) == before


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1 + 2j]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_complex_gradients_are_rounded_in_both_parts() -> None:
    layer, given = Complex(), torch.tensor([1.001 - 1.002j])
    with MUTANTS["gradient-rounded"].plant(Planting()):
        layer(given).real.sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(torch.view_as_real(layer.weight.grad), torch.tensor([[1.0, 1.0]]))


@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
@pytest.mark.parametrize(
    ("module", "drops"),
    [
        (lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5), True),
        (lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2), False),
        (lambda: nn.LSTM(WIDTH, WIDTH, dropout=0.5), False),  # it has one layer
        (lambda: nn.MultiheadAttention(WIDTH, 1, dropout=0.5), True),
        (lambda: nn.MultiheadAttention(WIDTH, 1), False),
    ],
)
def test_dropouts_of_other_layers_are_off_where_they_drop_anything(
    module: Callable[[], nn.Module], drops: bool
) -> None:
    fault, made, given = Planting(), module(), torch.ones(3, 2, WIDTH)
    with MUTANTS["evaluating"].plant(fault):
        made(*[given] * (3 if isinstance(made, nn.MultiheadAttention) else 1))
    assert bool(fault.hits) is drops
