"""Right runs of several operations on other runtimes, and what is not compared where little is handed back."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipeproof.foreign import WhiteBox, watch
from pipeproof.judging.verdict import Verdict
from tests.support.steps import WIDTH, loss_fn, pairs

STEPS = ["train", "train", "accumulate", "train", "eval", "train"]
Operations = Iterator[tuple[str, list[Any]]]


class ByMode(nn.Module):
    """As dropout, evaluation is another function; unlike it, training is the same each time."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=0) * 2 if self.training else x


def build() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, 12), ByMode(), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, WIDTH))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def run(
    model: nn.Module,
    operations: Operations,
    *,
    module: nn.Module | None = None,
    first: int = 1,
    parts: int | None = None,
    clear_first: bool = False,
    made: Callable[[nn.Module, list[float]], Any] = lambda model, losses: (model, losses),
) -> Iterator[Any]:
    """Trains ``model`` on one rank, called as ``module``; ``first``: -1 for the last microbatch first."""
    module, optimizer, updated = module or model, adam(model), False
    for operation, microbatches in operations:
        module.train(operation != "eval")
        if clear_first and operation != "eval" and updated:
            optimizer.zero_grad()
        updated = operation == "train" or (updated and operation == "eval")
        apart = isinstance(module, DistributedDataParallel) and operation == "accumulate"
        losses = []
        for x, target in microbatches[::first]:
            with module.no_sync() if apart else nullcontext(), torch.set_grad_enabled(operation != "eval"):
                loss = loss_fn(module(x), target)
                if operation != "eval":
                    (loss / (parts or len(microbatches))).backward()
            losses.append(loss.item())
        if operation == "train":
            optimizer.step()
        yield made(model, losses[::first])
        if operation == "train" and not clear_first:
            optimizer.zero_grad()


def sharded(model: nn.Sequential, operations: Operations) -> Iterator[Any]:
    for layer in (model[0], model[4], model):
        fully_shard(layer)
    return run(model, operations)


def replicated(model: nn.Sequential, operations: Operations) -> Iterator[Any]:
    return run(model, operations, module=DistributedDataParallel(model))


def in_a_copy(model: nn.Sequential, operations: Operations) -> Iterator[Any]:
    """The modules are copies whose names say something else."""
    stages = [nn.Sequential(*copy.deepcopy(model[:2])), nn.Sequential(*copy.deepcopy(model[2:]))]
    whole = nn.Sequential(*map(watch, stages))
    return run(whole, operations, made=lambda model, losses: (list(model), losses))


def judged(whitebox: WhiteBox, step: Any, ranks: Any = 1, *, steps: Any = STEPS, **more: Any) -> Verdict:
    wanted = {"reference": build, "loss_fn": loss_fn, "optimizer": adam} | more
    return whitebox.validate(step, microbatches=pairs(4 * len(steps)), ranks=ranks, steps=steps, **wanted)


RIGHT: dict[str, tuple[Any, Any]] = {
    "plain": (run, 1),
    "last microbatch first": (partial(run, first=-1), 1),
    "cleared before": (partial(run, clear_first=True), 1),
    "in a copy": (in_a_copy, 1),
    "replicated": (replicated, {"dp": 2}),
    "sharded": (sharded, {"fsdp": 2}),
}


@pytest.mark.parametrize("which", RIGHT)
def test_a_right_run_passes(whitebox: WhiteBox, which: str) -> None:
    step, ranks = RIGHT[which]
    verdict = judged(whitebox, step, ranks)
    assert verdict.verdict == "pass", verdict
    for law in ("second-step", "accumulation", "eval", "updated-parameters"):
        assert verdict.law(law).outcome == "pass", verdict
