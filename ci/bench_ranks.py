"""Ranks for a measurement: processes joined by gloo, and step times taken across all of them."""

import gc
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Step = Callable[[], None]


def on_ranks(n_ranks: int, job: Callable[..., Any], *args: object) -> list[Any]:
    """What ``job(rank, *args)`` returned on each of ``n_ranks`` freshly spawned ranks, passed on as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (n_ranks, folder, job, args), nprocs=n_ranks)
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(n_ranks)]


def _rank(rank: int, n_ranks: int, folder: str, job: Callable[..., Any], args: Sequence[object]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n_ranks)
    answer = job(rank, *args)
    Path(folder, f"rank{rank}.json").write_text(json.dumps(answer))
    leave()


def leave() -> None:
    """End this rank. About one in thirty aborts in a destructor of gloo's threads when it ends by itself."""
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def spans(steps: Mapping[str, Step], before: Step, rounds: int, batch: int) -> dict[str, list[list[float]]]:
    """When each step of each variant began and ended on this rank: per variant, ``rounds * batch`` pairs.

    The variants take turns within a round and the turn order rotates, so that drift of the machine meets all alike.
    ``before`` runs untimed before each step; a barrier follows it, so that all ranks start together.
    """
    names = list(steps)
    taken: dict[str, list[list[float]]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # the variants' own garbage still counts, imported modules do not
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for _ in range(batch):
                before()
                dist.barrier()
                began = perf_counter()
                steps[name]()
                taken[name].append([began, perf_counter()])
    return taken


def step_seconds(taken: Sequence[Mapping[str, Sequence[Sequence[float]]]], batch: int) -> dict[str, list[float]]:
    """Per variant and round, the median step time: from the first rank's start to the last rank's end.

    ``perf_counter`` is one clock for all processes of a machine.
    """
    seconds: dict[str, list[float]] = {}
    for name in taken[0]:
        ranks = zip(*(rank[name] for rank in taken), strict=True)
        steps = [max(end for _, end in step) - min(start for start, _ in step) for step in ranks]
        seconds[name] = [median(steps[k : k + batch]) for k in range(0, len(steps), batch)]
    return seconds
