"""The fastest layouts that fit: every legal one is weighed, and those that could be among the best are simulated."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from heapq import nsmallest
from itertools import product

from pipeproof.pipeline.layouts.cluster import Cluster
from pipeproof.pipeline.layouts.footprint import Footprint, footprint, least_held
from pipeproof.pipeline.layouts.layout import Job, Layout, Recompute, problems
from pipeproof.pipeline.layouts.pipelined import OFFERED
from pipeproof.pipeline.layouts.step_time import StepTime, least_time, step_time
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import VEE

LONG = 32_768  # tokens: from here on a sequence is worth dividing over ranks
_MICRO = (1, 2, 4, 8)
_CHUNKS = (2, 4, 8)


class Kind(StrEnum):
    """Kinds of parallelism besides data parallelism."""

    TENSOR = "tensor"
    CONTEXT = "context"
    PIPELINE = "pipeline"
    EXPERT = "expert"


@dataclass(frozen=True)
class Allowed:
    """What may be used. ``room``: the share of memory that may be filled; the rest is for buffers and fragments."""

    kinds: frozenset[Kind] = frozenset(Kind)
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[Recompute, ...] = tuple(Recompute)
    schedules: tuple[str, ...] = OFFERED
    micro: tuple[int, ...] = _MICRO
    room: float = 0.9


@dataclass(frozen=True)
class Choice:
    """A layout, what a device holds in it, and how long a step takes."""

    layout: Layout
    footprint: Footprint
    time: StepTime

    @property
    def sizes(self) -> tuple[int, ...]:
        """What tells layouts apart in a list of the best."""
        layout = self.layout
        return layout.tp, layout.cp, layout.pp, layout.dp, layout.ep


@dataclass(frozen=True)
class Found:
    """The fastest first; none where nothing fits. ``least``: then the one that holds least, if any is legal at all."""

    best: tuple[Choice, ...]
    least: Choice | None = None


def search(job: Job, cluster: Cluster, allowed: Allowed, *, most: int = 3) -> Found:
    """The ``most`` fastest layouts that differ in more than schedule, recompute, ZeRO and the size of a microbatch.

    Layouts are taken by the time that no schedule can beat; the search ends where that is above the last of the best.
    """
    room = allowed.room * cluster.device.memory
    every = list(layouts(job, cluster, allowed))
    fitting = [layout for layout in every if least_held(job, layout) <= room]
    found: dict[tuple[int, ...], Choice] = {}
    for least, _, layout in sorted((least_time(job, cluster, layout), k, layout) for k, layout in enumerate(fitting)):
        if len(found) >= most and least > nsmallest(most, (choice.time.total for choice in found.values()))[-1]:
            break
        choice = weighed(job, cluster, layout)
        if choice is None or choice.footprint.total > room:
            continue
        if choice.sizes not in found or choice.time.total < found[choice.sizes].time.total:
            found[choice.sizes] = choice
    best = tuple(nsmallest(most, found.values(), key=lambda choice: choice.time.total))
    return Found(best, None if best else _least(job, cluster, every))


def weighed(job: Job, cluster: Cluster, layout: Layout) -> Choice | None:
    """``layout`` with its figures; None where its schedule cannot be built for these sizes."""
    try:
        return Choice(layout, footprint(job, layout), step_time(job, cluster, layout))
    except ScheduleError:
        return None


def _least(job: Job, cluster: Cluster, every: list[Layout]) -> Choice | None:
    """What comes nearest to fitting, of the few that hold least before any activation."""
    nearest = nsmallest(
        30, every, key=lambda layout: (least_held(job, layout), layout.micro, layout.recompute != "full")
    )
    choices = [choice for layout in nearest if (choice := weighed(job, cluster, layout)) is not None]
    return min(choices, key=lambda choice: choice.footprint.total, default=None)


def layouts(job: Job, cluster: Cluster, allowed: Allowed) -> Iterator[Layout]:
    """Every legal layout of all devices."""
    experts = job.model.experts
    expert_sizes = _divisors(experts.count) if experts and Kind.EXPERT in allowed.kinds else (1,)
    tensor = _divisors(min(cluster.per_node, cluster.devices)) if Kind.TENSOR in allowed.kinds else (1,)
    context = _divisors(cluster.devices) if Kind.CONTEXT in allowed.kinds and job.sequence >= LONG else (1,)
    for tp, cp in product(tensor, context):
        rest, over = divmod(cluster.devices, tp * cp)
        if over:
            continue
        for pp in _divisors(rest) if Kind.PIPELINE in allowed.kinds else (1,):
            dp = rest // pp
            for ep, micro in product(expert_sizes, allowed.micro):
                if any(problems(Layout(tp, cp, pp, dp, ep, micro=micro), job)):
                    continue
                for zero, recompute in product(allowed.zero if dp * cp > 1 else allowed.zero[:1], allowed.recompute):
                    for schedule, virtual in _schedules(pp, allowed.schedules):
                        if pp * virtual <= job.model.layers:
                            yield Layout(tp, cp, pp, dp, ep, zero, recompute, schedule, virtual, micro)


def _schedules(pp: int, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for name in names if pp > 1 else ("1f1b",):
        for virtual in _CHUNKS if name == "interleaved" else (2,) if name in VEE else (1,):
            yield name, virtual


@cache
def _divisors(number: int) -> tuple[int, ...]:
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return tuple(sorted({*small, *(number // k for k in small)}))
