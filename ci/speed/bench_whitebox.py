"""Part g: what validating a foreign step adds to it, in units of the reference's own time."""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from bench_table import Row, Target, ratio
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.core.judge import one_thread
from pipeproof.whitebox import WhiteBox
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

WIDTH, ROWS, LAYERS, MICROBATCHES = 512, 64, 8, 8
loss_fn = nn.functional.mse_loss
Data = list[tuple[Tensor, Tensor]]


def measure(*, ranks: int, rounds: int) -> list[Row]:
    """A row unwatched and a row watched: seconds of the step alone, of its validation, and of the reference alone."""
    rows, data = [], _data()
    with World() as world:
        for name, step in (("gradients", _step), ("watched", _watched_step)):
            variants: dict[str, Callable[[], Any]] = {
                "step": lambda step=step: world.run(_alone, step, data, ranks=ranks),
                "validate": lambda step=step: _validate(world, step, data, ranks),
                "reference": lambda: reference_step(data),
            }
            rows.append(_row(name, _turns(variants, rounds)))
    return rows


def build_model() -> nn.Module:
    """Blocks of a linear layer and a GELU."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def reference_step(data: Data) -> None:
    """The reference's own step: a plain loop over the microbatches."""
    with one_thread():
        model = build_model()
        for x, target in data:
            (loss_fn(model(x), target) / len(data)).backward()


def added(seconds: dict[str, list[float]]) -> float:
    """The median over rounds of what validating adds to the step, in units of the reference's time."""
    extra = [all_ - alone for all_, alone in zip(seconds["validate"], seconds["step"], strict=True)]
    return ratio(extra, seconds["reference"])


def _row(name: str, seconds: dict[str, list[float]]) -> Row:
    medians = {variant: median(values) for variant, values in seconds.items()}
    return Row(name, medians, [Target("added/reference", added(seconds), 3.0)])


def _turns(variants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            began = perf_counter()
            run()
            if number:  # the first round starts the ranks
                seconds[name].append(perf_counter() - began)
    return seconds


def _validate(world: World, step: Callable[..., Any], data: Data, ranks: int) -> None:
    verdict = WhiteBox(world).validate(step, reference=build_model, microbatches=data, ranks=ranks, loss_fn=loss_fn)
    assert verdict.tier == "bitwise", str(verdict)


def _alone(context: RankContext, step: Callable[..., Any], data: Data) -> None:
    step(build_model(), data)


def _watched_step(model: nn.Module, data: Data) -> Any:
    return _step(model, data, watch)


def _step(model: nn.Module, data: Data, observe: Callable[[nn.Module], nn.Module] = lambda module: module) -> Any:
    """A microbatch at a time down the ranks and up again."""
    assert isinstance(model, nn.Sequential)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each = LAYERS // ranks
    stage, losses = observe(model[rank * each : (rank + 1) * each]), []
    for x, target in data:
        if rank:
            x = _receive(rank - 1).requires_grad_()
        y = stage(x)
        if rank == ranks - 1:
            losses.append(loss_fn(y, target))
            (losses[-1] / len(data)).backward()
        else:
            dist.send(y.detach(), rank + 1)
            y.backward(_receive(rank + 1))
        if rank:
            dist.send(x.grad, rank - 1)
    return stage, [loss.detach() for loss in losses]


def _receive(peer: int) -> Tensor:
    tensor = torch.empty(ROWS, WIDTH)
    dist.recv(tensor, peer)
    return tensor


def _data() -> Data:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw))
        for _ in range(MICROBATCHES)
    ]
