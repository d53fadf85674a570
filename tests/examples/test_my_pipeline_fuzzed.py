"""A 1F1B by hand on drawn ranks, microbatches and splits: the example of the guide that fuzzes one's own step."""

import torch
from my_pipeline import OneFOneB, build_model, loss_fn  # your own code
from torch import distributed, nn

from pipeproof import watch
from pipeproof.whitebox import WhiteBox


def my_step(model: nn.Sequential, microbatches: list, split: tuple[int, ...]) -> tuple:
    rank = distributed.get_rank()
    start = sum(split[:rank])
    stage = watch(model[start : start + split[rank]])
    return stage, OneFOneB(stage, microbatches).step()


def draw(m: int, rows: int, generator: torch.Generator) -> tuple:
    return torch.randn(rows, 16, generator=generator), torch.randn(rows, 16, generator=generator)


def test_any_case(whitebox: WhiteBox) -> None:
    result = whitebox.fuzz(my_step, reference=build_model, data=draw, loss_fn=loss_fn, ranks=(2, 3), cases=20)
    result.raise_if_failed()
