"""Ranks for a measurement: processes in one group, and step times taken across all of them."""

import gc
import json
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pipeproof.worlds import accelerator

Step = Callable[[], None]
QUIET = 0.15  # cores: the most that other processes may use in a round that counts
FEWEST = 5  # rounds: with fewer quiet ones than this, all count


def on_ranks(n_ranks: int, job: Callable[..., Any], *args: object, device: str = accelerator.CPU) -> list[Any]:
    """What ``job(rank, *args)`` returned on each of ``n_ranks`` freshly spawned ranks, passed on as JSON.

    ``device`` is as a world has it; ``own_place`` says where a rank is.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (n_ranks, folder, device, job, args), nprocs=n_ranks)
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(n_ranks)]


def _rank(rank: int, n_ranks: int, folder: str, device: str, job: Callable[..., Any], args: Sequence[object]) -> None:
    global _place
    torch.set_num_threads(1)
    _place = accelerator.place_of(device, rank)
    accelerator.use(_place)
    backend, host = accelerator.backend_of(device, n_ranks), accelerator.HOST
    if backend != host:  # what ranks agree on is on the host
        backend = f"{accelerator.CPU}:{host},{accelerator.split(device)[0]}:{backend}"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=n_ranks)
    answer = job(rank, *args)
    Path(folder, f"rank{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)  # gloo's threads abort now and then when the group is destroyed right after a collective


_place = accelerator.CPU  # of this process, where it is a rank


def own_place() -> str:
    """Where this rank computes."""
    return _place


def wire() -> torch.device:
    """Where tensors are while they travel: in the host's memory, or where they are computed."""
    return torch.device(accelerator.CPU if dist.get_backend() == accelerator.HOST else _place)


@dataclass(frozen=True)
class Turns:
    """How variants take turns: until so many rounds were quiet, or the time is up. A turn is ``batch`` steps."""

    rounds: int
    limit_s: float
    batch: int = 1


def take_turns(steps: Mapping[str, Step], before: Step, turns: Turns) -> dict[str, Any]:
    """When each step of each variant began and ended on this rank, and each round's load from other processes.

    The variants take turns within a round and the order rotates, so that drift of the machine meets all alike.
    ``before`` runs untimed before each step; a barrier follows it, so that all ranks start together.
    """
    names, foreign = list(steps), []
    taken: dict[str, list[list[float]]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # the variants' own garbage still counts, imported modules do not
    began = perf_counter()
    while sum(load < QUIET for load in foreign) < turns.rounds and not _all_agree(
        perf_counter() - began > turns.limit_s
    ):
        load, turn = _Load(), len(foreign) % len(names)
        for name in names[turn:] + names[:turn]:
            for _ in range(turns.batch):
                before()
                accelerator.synchronize(_place)
                dist.barrier()
                start = perf_counter()
                steps[name]()
                accelerator.synchronize(_place)
                taken[name].append([start, perf_counter()])
        foreign.append(load.foreign())
    return {"spans": taken, "foreign": foreign}


def step_seconds(taken: Sequence[Mapping[str, Any]], batch: int) -> dict[str, list[float]]:
    """Per variant and round, the median step time: from the first rank's start to the last rank's end.

    ``perf_counter`` is one clock for all processes of a machine. Only quiet rounds count, unless there are hardly any.
    """
    foreign = taken[0]["foreign"]
    quiet = [number for number, load in enumerate(foreign) if load < QUIET]
    counted = quiet if len(quiet) >= FEWEST else range(len(foreign))
    seconds: dict[str, list[float]] = {}
    for name in taken[0]["spans"]:
        ranks = zip(*(rank["spans"][name] for rank in taken), strict=True)
        steps = [max(end for _, end in step) - min(start for start, _ in step) for step in ranks]
        seconds[name] = [median(steps[number * batch : (number + 1) * batch]) for number in counted]
    return seconds


def conditions(taken: Sequence[Mapping[str, Any]]) -> str:
    """How many rounds were counted, and under what load from other processes."""
    foreign = taken[0]["foreign"]
    quiet = sum(load < QUIET for load in foreign)
    if quiet >= FEWEST:
        return f"{quiet} quiet rounds of {len(foreign)}"
    return f"{len(foreign)} rounds, none left out: others used {median(foreign):.1f} cores"


class _Load:
    """The processor time, in cores, that processes other than the ranks used since this object was made.

    Every rank must make one, and ask. Rank 0 looks: a number that differed between ranks would end the rounds of some
    before the others'.
    """

    def __init__(self) -> None:
        pids = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(pids, torch.tensor([os.getpid()]))
        self._ranks = frozenset(int(pid) for pid in pids)
        self._began = self._now()

    def foreign(self) -> float:
        """The same number on every rank."""
        wall, others = (b - a for a, b in zip(self._began, self._now(), strict=True))
        cores = torch.tensor([others / wall], dtype=torch.float64)
        dist.broadcast(cores, 0)
        return cores.item()

    def _now(self) -> tuple[float, float]:
        others = process_seconds(but=self._ranks) + machine_seconds()[2] if dist.get_rank() == 0 else 0.0
        return perf_counter(), others


def process_seconds(*, but: Collection[int] = (), proc: Path = Path("/proc")) -> float:
    """The processor time so far of all processes that can be observed, ``but`` these; 0 on a system that does not say.

    The machine's own count would not do: it charges whole ticks, and of ranks that wake each other thousands of times
    a second it made up to one core more than all processes together used. A process that has ended is counted with
    its parent.
    """
    return sum(_seconds_of(folder) for folder in proc.glob("[0-9]*") if int(folder.name) not in but)


def _seconds_of(process: Path) -> float:
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()  # its name may hold blanks
    except OSError:
        return 0.0  # it has ended
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # its own, and that of its ended children


def machine_seconds() -> tuple[float, float, float, float]:
    """The machine's processor time so far: busy for users, for the system, stolen by its host, idle."""
    try:
        user, nice, system, idle, iowait, irq, softirq, steal = _proc_stat()
    except (OSError, ValueError):
        return 0.0, 0.0, 0.0, 0.0  # a system that does not say
    return user + nice, system + irq + softirq, steal, idle + iowait


def _proc_stat() -> list[float]:
    ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return [int(tick) / os.sysconf("SC_CLK_TCK") for tick in ticks]


def _all_agree(mine: bool) -> bool:
    votes = torch.tensor([mine], dtype=torch.int64)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())
