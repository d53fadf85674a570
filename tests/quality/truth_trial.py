"""What the functional and the asynchronous pipeline run on, and their rows: runs with a truth each."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import runtime_async_training
import runtime_functional_training
import torch
from runtime_partial import Wide
from torch import Tensor, nn
from truth_check import RIGHT, Counts, Run, Truth, from_gradients
from truth_layers import Layer, altered, frozen, linear, of_dtype, with_norms
from truth_models import OPTIMIZERS, WIDTH, Block, Build, Chain, Pairs, blocks, data_of, loss_fn, of, seeded

from pipeproof import Contract, StageByStage

LAYERS, COUNT = 6, 6
TWICE = [0, 1, 0, 1]  # two stages, two replicas


class Split(Block):
    """A block under autocast, wholly or in evaluations; ``cut``: its product is made in two parts."""

    cut, always = False, False

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.always or not self.training):
            if not self.cut:
                return super().forward(x).float()
            h, w, half = self.norm(x), self.linear.weight, WIDTH // 2
            made = h[:, :half] @ w[:, :half].T + h[:, half:] @ w[:, half:].T + self.linear.bias
            return (x + nn.functional.gelu(made)).float()


class Cast(Split):
    """A block under autocast, whose product may be made of a copy of the weight that was cast once."""

    always, keeps = True, False

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.keeps:
            return super().forward(x)
        if self.kept is None:
            self.kept = self.linear.weight.detach().clone()
        with torch.autocast("cpu", torch.bfloat16):
            old = self.linear.weight + (self.kept - self.linear.weight).detach()
            made = nn.functional.linear(self.norm(x), old, self.linear.bias)
            return (x + nn.functional.gelu(made)).float()


class Keyed(Block):
    """A block with dropout that is drawn by a key in the last column; ``shift`` changes those of calls with a graph."""

    shift = 0

    def forward(self, given: Tensor) -> Tensor:
        x, key = given[:, :WIDTH], given[:, WIDTH:]
        y = super().forward(x)
        if self.training:
            shift = self.shift if torch.is_grad_enabled() else 0
            draw = torch.Generator().manual_seed(int(key[0, 0]) + shift)
            y = y * (torch.rand(y.shape, generator=draw) > 0.2) / 0.8
        return torch.cat([y, key], dim=1)


def _tied() -> nn.Module:
    """The first and the last layer share a weight, the last transposed."""
    first = Layer(lambda layer, x: x @ layer.table)
    first.table = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
    middle, last = blocks(count=LAYERS - 2), Layer(lambda layer, x: x @ layer.table.T)
    last.table = first.table
    return Chain(first, *middle, last)


def _of(kind: Build) -> Build:
    return of(kind, count=LAYERS)


MODELS: Mapping[str, Build] = {
    name: seeded(build)
    for name, build in {
        "plain": _of(Block),
        "four": of(count=4),
        "frozen first": frozen(0, 1, count=LAYERS),
        "frozen middle": frozen(3, count=LAYERS),
        "tied": _tied,
        "norms": _of(with_norms),
        "dropout": _of(Keyed),
        "eval in bf16": _of(Split),
        "autocast": _of(Cast),
        "in place": _of(altered(lambda block, x: torch.relu_(block.linear(block.norm(x)).add_(0.1)))),
        "wide": of(Wide, count=4),
        "bf16": of_dtype(torch.bfloat16, LAYERS),
        "weight norm": _of(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(linear()), nn.Tanh())),
    }.items()
}


def keyed(count: int = COUNT) -> Pairs:
    """Data whose last column is a key."""
    pairs = data_of(count=count)
    keys = [torch.full((len(x), 1), 100.0 + m) for m, (x, _) in enumerate(pairs)]
    return [(torch.cat([x, key], dim=1), torch.cat([t, key], dim=1)) for (x, t), key in zip(pairs, keys, strict=True)]


def steps(*plan: str, by: str = "sgd") -> dict[str, Any]:
    """Several operations, of which a way and ``validate`` are told."""
    return {"optimizer": by, "more": {"contract": Contract(operations=plan), "optimizer": OPTIMIZERS[by]}}


def unequal() -> dict[str, Any]:
    """Seven microbatches on two replicas."""
    more = {"contract": Contract(loss_divisor=7.0)}
    return {"divisor": 7.0, "replicas": 2, "data": data_of(count=7), "more": more}


def loss_of_rows(output: Tensor, target: Tensor) -> Tensor:
    """The loss of as many rows as the target has."""
    return loss_fn(output[: len(target)], target)


def _of_itself(model: Any, microbatches: Any, *, step: Callable[..., Any], build: Build, watched: bool) -> Any:
    """The model of a step that is held against itself is on the meta device: each rank has stages of its own."""
    return step(build(), microbatches, watched=watched)


RUNTIMES: Mapping[str, Any] = {"functional": runtime_functional_training, "async": runtime_async_training}


def trial(runtime: str, name: str, truth: Truth = RIGHT, *, against: str = "reference", **how: Any) -> Run:
    """A run of one of the two. ``against``: "reference", "itself", or "own": stages that the step builds itself, beside
    the reference. ``more``: what else ``validate`` is told; what is not named here is of the way.
    """
    ranks, model, more = how.pop("ranks", 3), how.pop("model", "plain"), how.pop("more", {})
    build, module, contract = MODELS[model], RUNTIMES[runtime], more.get("contract", Contract())
    data = how.pop("data", None) or data_of(count=COUNT * max(len(contract.operations), 1))
    each = len(contract.parts(len(data))[0])
    if how.get("by") == "vjp":  # watched or not, its calls are not observed: torch.func's tensors have no storage
        truth = from_gradients(truth)
    if (step := how.pop("step", None)) is None:
        tied = {"tied": ("0.table", "5.table")} if model == "tied" else {}
        step = partial(module.course if contract.operations else module.step, way=module.Way(**how), **tied)
    if against != "reference":
        step = partial(_of_itself, step=step, build=build)
    expected = {"reference": build, "loss_fn": loss_of_rows}
    if against == "itself":
        expected = {"reference": StageByStage(loss_of_rows, build=build)}
    return Run(
        f"{runtime}: {name}" + {"itself": ", against itself", "own": ", of its own build"}.get(against, ""),
        step,
        truth,
        {**expected, "microbatches": data, "ranks": ranks, "timeout_s": 60.0, **more},
        Counts(ranks, ranks, each) if isinstance(ranks, int) else Counts(4, 2, each, 2),
        ways=(True,) if against == "itself" else (True, False),  # what is held against itself has to be watched
    )


def fault(runtime: str, name: str, truth: Truth, *, title: str = "", **how: Any) -> Run:
    """The row of a fault: it is at rank 1 unless ``at`` says where."""
    return trial(runtime, title or name, truth, fault=name, **how)
