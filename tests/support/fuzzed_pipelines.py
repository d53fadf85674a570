"""Pipelines that a campaign fuzzes: those of the examples, dealt by ``split=``, and faults that few cases show."""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, cycle, pairwise, tee
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.whitebox import StepCase
from tests.examples import my_pipeline
from tests.examples.my_pipeline import OneFOneB, loss_fn
from tests.support.racy_1f1b import ONE_BUFFER
from tests.support.steps import blocks

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import interleaved_loop
import weight_grad_store

WIDTH, LAYERS = 6, 8
Pairs = list[tuple[Tensor, Tensor]]


build = partial(blocks, LAYERS, width=WIDTH)


def draw(m: int, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A microbatch."""
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def dealt(model: nn.Sequential, split: Sequence[int]) -> list[nn.Sequential]:
    """The stages."""
    return [model[start:end] for start, end in pairwise((0, *accumulate(split)))]


def by_hand(model: nn.Sequential, microbatches: Pairs, split: Sequence[int], fault: str = "") -> Any:
    """1F1B by hand."""
    rank = dist.get_rank()
    start = rank * split[rank] if fault == "start-by-own-size" else sum(split[:rank])
    stage = watch(model[start : start + split[rank]])
    if fault == "lone-layer-frozen" and rank == 2 and len(stage) == 1:
        stage.requires_grad_(False)
    runtime = ONE_BUFFER if fault == "one-buffer" else OneFOneB
    with patch.object(my_pipeline, "min", _first if fault == "warm-up-unbounded" else min, create=True):
        return stage, runtime(stage, microbatches).step()


def interleaved(model: nn.Sequential, microbatches: Pairs, split: Sequence[int], v: int, fault: str = "") -> Any:
    """The interleaved loop: chunk c of rank r is stage c P + r."""
    rank, ranks, count = dist.get_rank(), dist.get_world_size(), len(microbatches)
    beside = fault == "chunks-side-by-side"
    chunks = [watch(dealt(model, split)[rank * v + c if beside else c * ranks + rank]) for c in range(v)]
    data = cycle(microbatches[:7]) if fault == "seven-kept" else microbatches

    def forward_step(data: Any, chunk: nn.Module, x: Tensor | None) -> Any:
        inputs, target = next(data)
        return chunk(inputs if x is None else x), lambda output: loss_fn(output, target)

    with patch.object(interleaved_loop, "min", _first if fault == "warm-up-unbounded" else min, create=True):
        losses = interleaved_loop.forward_backward(
            forward_step,
            list(tee(data, v)),
            chunks,
            num_microbatches=count,
            shape=microbatches[0][0].shape,
            fault=fault,
        )
    return chunks, losses


class _FaultyStore(weight_grad_store.WeightGradStore):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        if fault == "queue-of-two":  # which drops the oldest that is left
            self.queue = deque(maxlen=2)

    def flush(self) -> None:
        before, few = self.cache, self.fault == "four-layers-at-most"
        self.cache = before[:4] if few else before
        self.turns = getattr(self, "turns", 0) + 1
        if self.fault != "in-twos" or self.turns % 2 == 0:
            super().flush()
        self.cache = before if self.fault == "cache-kept" else self.cache


def zero_bubble(model: nn.Sequential, microbatches: Pairs, split: Sequence[int], fault: str = "") -> Any:
    """The zero-bubble loop."""
    store = _FaultyStore(fault)
    layers = dealt(model, split)[dist.get_rank()]
    both = [[weight_grad_store.StoredLinear(block[0], store), nn.Tanh()] for block in layers]
    stage = watch(nn.Sequential(*(one for pair in both for one in pair)))
    return stage, weight_grad_store.zero_bubble(stage, store, microbatches, loss_fn)


def _first(one: int, other: int) -> int:
    return one


@dataclass(frozen=True)
class Fuzzed:
    """A pipeline, by fault the smallest case that shows it, and what else a campaign has to know."""

    step: Callable[..., Any]
    faults: dict[str, str]
    words: dict[str, Any] = field(default_factory=lambda: {"ragged": False})


def in_groups(case: StepCase) -> bool:
    """Whether microbatches are a multiple of ranks, as the interleaved loop wants them."""
    return case.microbatches % case.ranks == 0  # type: ignore[operator]


PIPELINES = (
    Fuzzed(
        by_hand,
        {
            "one-buffer": "ranks=4 microbatches=2 rows=1 split=2,2,2,2 seed=0",
            "warm-up-unbounded": "ranks=4 microbatches=1 rows=1 split=2,2,2,2 seed=0",
            "lone-layer-frozen": "ranks=4 microbatches=1 rows=1 split=1,1,1,5 seed=0",
            "start-by-own-size": "ranks=2 microbatches=1 rows=1 split=1,7 seed=0",
        },
    ),
    Fuzzed(
        interleaved,
        {
            "chunks-side-by-side": "ranks=2 microbatches=2 rows=1 split=2,2,2,2 v=2 seed=0",
            "other-chunk": "ranks=2 microbatches=4 rows=1 split=4,4 v=1 seed=0",
            "warm-up-unbounded": "ranks=4 microbatches=4 rows=1 split=2,2,2,2 v=1 seed=0",
            "seven-kept": "ranks=2 microbatches=8 rows=1 split=4,4 v=1 seed=0",
        },
        {"options": {"v": (1, 2)}, "where": in_groups, "ragged": False},
    ),
    Fuzzed(
        zero_bubble,
        {
            "queue-of-two": "ranks=4 microbatches=3 rows=1 split=2,2,2,2 seed=0",
            "cache-kept": "ranks=2 microbatches=2 rows=1 split=4,4 seed=0",
            "four-layers-at-most": "ranks=2 microbatches=1 rows=1 split=1,7 seed=0",
            "in-twos": "ranks=2 microbatches=1 rows=1 split=4,4 seed=0",
        },
        {},
    ),
)
