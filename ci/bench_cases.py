"""Part c: fuzz cases per second, against a world spawned for each case."""

import tempfile
import time
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_table import Row
from torch import nn

from pipeline import PipelineSchedule

HIDDEN = 8
MICROBATCHES = 4


def measure(*, ranks: int, rounds: int) -> list[Row]:
    """Cases per second, with a world spawned per case."""
    spawned = [1 / _timed(ranks) for _ in range(rounds)]
    return [Row("spawn per case", {"cases/s": median(spawned)})]


def _timed(ranks: int) -> float:
    began = time.perf_counter()
    spawn_a_case(ranks)
    return time.perf_counter() - began


def spawn_a_case(ranks: int) -> None:
    """What a test does that starts its own ranks: spawn them, join them, run one small step, end them."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_case, (ranks, f"file://{folder}/store"), nprocs=ranks)


def _case(rank: int, ranks: int, address: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    torch.manual_seed(rank)
    module = nn.Linear(HIDDEN, HIDDEN)
    microbatches = [(torch.randn(2, HIDDEN), torch.randn(2, HIDDEN)) for _ in range(MICROBATCHES)]
    pipeline = PipelineSchedule(
        kind="1f1b", n_microbatches=MICROBATCHES, stages=[module], loss_fn=nn.functional.mse_loss
    )
    result = pipeline.train_step(microbatches)
    assert result.grad_norm, "a case that exercises nothing measures nothing"
    dist.destroy_process_group()
