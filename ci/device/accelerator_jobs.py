"""Running jobs held against themselves: a step by hand on two ranks that share a device, through the host."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pipeproof import StageByStage, check_step
from pipeproof.worlds.accelerator import CPU
from pipeproof.worlds.worker import RankContext


@dataclass(frozen=True)
class Size:
    """Of a GPT: words, width, blocks on each rank, heads; and of its data: rows, length, microbatches."""

    words: int = 64
    width: int = 64
    blocks: int = 1
    heads: int = 4
    rows: int = 4
    length: int = 32
    count: int = 4

    @property
    def hidden(self) -> tuple[int, int, int]:
        """The shape of an activation."""
        return self.rows, self.length, self.width


LARGE = Size(words=32_000, width=1024, blocks=6, heads=16, length=1024, count=8)


@dataclass(frozen=True)
class Job:
    """What a job does. ``cast``: under autocast to this. ``weights``: their type. ``fault``: what is wrong with it.

    ``any_order``: a sum in it is made by atomic additions. ``own``: dropout draws from a generator that no module has.
    """

    cast: torch.dtype | None = None
    weights: torch.dtype = torch.float32
    dropout: float = 0.0
    own: bool = False
    any_order: bool = False
    host: bool = False
    fault: str = ""
    size: Size = Size()

    @property
    def scaled(self) -> bool:
        """Whether its losses are scaled."""
        return self.cast is torch.float16


RIGHT: Mapping[str, Job] = {
    "fp32": Job(),
    "fp32, dropout, kept on the host": Job(dropout=0.1, host=True),
    "fp32, dropout by a generator of its own": Job(dropout=0.1, own=True),
    "fp32, sums in any order": Job(any_order=True),
    "bf16 under autocast, dropout": Job(cast=torch.bfloat16, dropout=0.1),
    "fp16 under autocast, scaled losses": Job(cast=torch.float16),
    "weights in bf16": Job(weights=torch.bfloat16),
}
FAULTY: Mapping[str, Job] = {
    "a gradient is scaled by 1.02 on its way": Job(fault="scaled"),
    "a message is used twice": Job(cast=torch.bfloat16, fault="stale"),
    "gradients of one weight lose a quarter": Job(any_order=True, fault="lost"),
    "gradients change after they were compared": Job(fault="late"),
}


class Block(nn.Module):
    """Attention and a feed-forward layer. ``generator``: what its dropout draws from, if not from the device's."""

    def __init__(self, job: Job, generator: torch.Generator | None) -> None:
        super().__init__()
        width = job.size.width
        self.job, self.draw = job, lambda like: torch.rand(like.shape, generator=generator, device=like.device)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        every = self.mixed(self.before(x)).view(rows, length, 3, self.job.size.heads, -1).permute(2, 0, 3, 1, 4)
        observed = functional.scaled_dot_product_attention(*every, is_causal=True).transpose(1, 2)
        x = x + self._dropped(self.out(observed.reshape(rows, length, width)))
        x = x + self._dropped(self.down(functional.gelu(self.up(self.between(x)))))
        if not self.job.any_order:
            return x
        places = torch.arange(rows * length, device=x.device) % length  # each position's mean, added up as it comes
        means = torch.zeros(length, width, device=x.device, dtype=x.dtype).index_add(0, places, x.flatten(0, 1)) / rows
        return x + means[places].view_as(x)

    def _dropped(self, x: Tensor) -> Tensor:
        if not self.job.own:
            return functional.dropout(x, self.job.dropout, self.training)
        return x * (self.draw(x) >= self.job.dropout) / (1 - self.job.dropout)


class Stage(nn.Module):
    """The first half of a GPT, or the last."""

    def __init__(self, job: Job, rank: int, generator: torch.Generator | None) -> None:
        super().__init__()
        torch.manual_seed(rank)
        size = job.size
        self.words = None if rank else nn.Embedding(size.words, size.width)
        self.blocks = nn.Sequential(*(Block(job, generator) for _ in range(size.blocks)))
        self.head = (
            nn.Sequential(nn.LayerNorm(size.width), nn.Linear(size.width, size.words)) if rank else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.blocks(x if self.words is None else self.words(x)))
        return made


def _name(stage: int, name: str) -> str:
    return f"{stage}.{name}"


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Of logits in whatever type."""
    return functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())


class Running:
    """The job on one of two ranks."""

    def __init__(self, context: RankContext, job: Job) -> None:
        self.job, self.rank, self.place = job, context.rank, torch.device(context.device)
        kind = self.place.type
        self.generator = torch.Generator(self.place).manual_seed(7) if job.own else None
        self.stage = Stage(job, self.rank, self.generator).to(self.place, job.weights)
        self.optimizer = torch.optim.AdamW(self.stage.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(kind, init_scale=1024.0) if job.scaled else None
        draw, size = torch.Generator().manual_seed(1), job.size
        drawn = torch.randint(size.words, (size.count, 2, size.rows, size.length), generator=draw).to(self.place)
        self.data = [(x, target) for x, target in drawn]

    def checked(self, **how: Any) -> Any:
        """A step that is checked; the verdict."""
        generators = [] if self.generator is None else [self.generator]
        against = StageByStage(loss_fn, optimizer=self.optimizer, scaler=self.scaler, generators=generators, **how)
        named = f"{self.rank}.{{}}".format
        with check_step(
            {self.rank: self.stage}, self.data, against=against, rename=lambda _, name: named(name)
        ) as check:
            losses = self.step(check)
            check.report(losses=losses or None)
        return check.verdict

    def step(self, check: Any = None) -> list[Tensor]:
        """A step; the losses, on the last rank."""
        losses: list[Tensor] = []
        live = [self._forward(number, losses) for number in range(len(self.data))]
        for number, (x, y) in enumerate(live):
            self._backward(number, x, y)
        if self.scaler is not None:
            self.scaler.scale(torch.zeros(1, device=self.place))  # or the first rank's has no scale
            self.scaler.unscale_(self.optimizer)
        first = next(self.stage.parameters())
        if self.job.fault == "lost" and self.rank:
            first.grad *= 0.75  # type: ignore[operator]  # it is there
        if check is not None:
            check.gradients()
        if self.job.fault == "late" and not self.rank:
            first.grad *= 0.5  # type: ignore[operator]
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        return losses

    def _forward(self, number: int, losses: list[Tensor]) -> tuple[Tensor, Tensor]:
        x, target = self.data[number]
        if self.rank:
            x = self._received(0)
            x = self._last if self.job.fault == "stale" and number == 2 else x.requires_grad_()
            self._last = x
        with torch.autocast(self.place.type, self.job.cast or torch.bfloat16, enabled=self.job.cast is not None):
            y = self.stage(x)
            if not self.rank:
                dist.send(y.detach().cpu(), 1)
                return x, y
            losses.append(loss_fn(y, target))
            return x, losses[-1] / len(self.data)

    def _backward(self, number: int, x: Tensor, y: Tensor) -> None:
        if not self.rank:
            y.backward(self._received(1) * (1.02 if self.job.fault == "scaled" and number == 1 else 1.0))
            return
        (y if self.scaler is None else self.scaler.scale(y)).backward()
        assert x.grad is not None
        dist.send(x.grad.cpu(), 0)

    def _received(self, peer: int) -> Tensor:
        came = torch.empty(self.job.size.hidden, dtype=self.job.weights)
        dist.recv(came, peer)
        return came.to(self.place)

    @property
    def content(self) -> str:
        """The weights in a few letters."""
        found = hashlib.sha256()
        for one in self.stage.parameters():
            found.update(one.detach().float().cpu().numpy())
        return found.hexdigest()


def judged(context: RankContext, job: Job) -> tuple[str, str, bool, bool]:
    """How two steps are judged, and what is said; whether the job goes on as it would, and does so twice."""
    running = Running(context, job)
    verdicts = [running.checked(host=job.host) for _ in range(2)]
    alone = [_alone(context, job) for _ in range(2)]
    worst = max(verdicts, key=lambda one: ("pass", "unknown").index(one.word) if one.word != "fail" else 2)
    told = next((one.strip() for one in str(worst).splitlines() if "cause  " in one), str(worst).splitlines()[0])
    return worst.word, told, running.content == alone[0], alone[0] == alone[1]


def _alone(context: RankContext, job: Job) -> str:
    """The weights after two steps that nobody checks."""
    running = Running(context, job)
    running.step()
    running.step()
    return running.content


def costs(context: RankContext, job: Job, rounds: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of a step alone and of one that is checked, and the most memory in MB: medians."""
    running = Running(context, job)
    ways = {
        "plain": running.step,
        "composed": running.checked,
        "one stage": lambda: running.checked(stages="one by one"),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(1 + rounds):
        for name, way in ways.items():
            taken[name].append(_timed(running.place, way))
    return {name: (median(t for t, _ in each[1:]), max(m for _, m in each[1:])) for name, each in taken.items()}


def _timed(place: torch.device, way: Any) -> tuple[float, float]:
    device: Any = None if place.type == CPU else torch.get_device_module(place)
    dist.barrier()
    if device is not None:
        device.synchronize()
        device.reset_peak_memory_stats()
    began = perf_counter()
    way()
    if device is not None:
        device.synchronize()
    dist.barrier()
    memory = 0.0 if device is None else device.max_memory_allocated() / 2**20
    return (perf_counter() - began) * 1e3, memory


def large(device: str, sizes: Sequence[Size] = (Size(), LARGE)) -> list[tuple[str, Job]]:
    """What costs are measured of: on the processor small jobs alone."""
    every = sizes[:1] if device == CPU else sizes
    cast = None if device == CPU else torch.bfloat16
    return [(f"{one.blocks} blocks of width {one.width} on each rank", Job(cast=cast, size=one)) for one in every]
