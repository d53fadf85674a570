"""Search for the fastest layouts that fit: legal ones are bounded, and promising ones simulated."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from heapq import heapify, heappop, heappush, nsmallest
from itertools import count, product
from math import inf

from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import LOOPED, VEE
from pipeproof.pipeline.sizes import SHOWN
from pipeproof.wings.advise.cluster import Cluster
from pipeproof.wings.advise.footprint import Footprint, footprint, least_held
from pipeproof.wings.advise.layout import Job, Layout, Recompute, problems
from pipeproof.wings.advise.pipelined import MOST_STAGES, OFFERED
from pipeproof.wings.advise.step_time import StepTime, least_time, step_time, unhindered_time

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
    """Allowed options. ``room``: the usable share of memory; the rest holds buffers and fragments."""

    kinds: frozenset[Kind] = frozenset(Kind)
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[Recompute, ...] = tuple(Recompute)
    schedules: tuple[str, ...] = OFFERED
    micro: tuple[int, ...] = _MICRO
    room: float = 0.9


@dataclass(frozen=True)
class Choice:
    """A layout with its memory on a device, and the time of a step."""

    layout: Layout
    footprint: Footprint
    time: StepTime

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that distinguish the best layouts."""
        layout = self.layout
        return layout.tp, layout.cp, layout.pp, layout.dp, layout.ep


@dataclass(frozen=True)
class Found:
    """Layouts, fastest first; empty if none fits. ``least``: then the smallest legal one."""

    best: tuple[Choice, ...]
    least: Choice | None = None


def find_layouts(job: Job, cluster: Cluster, allowed: Allowed, *, most: int = 3) -> Found:
    """Return the ``most`` fastest layouts that differ beyond schedule, recompute, ZeRO and microbatch size.

    Meshes, and layouts on them, are visited by their lower bounds of time; the search ends when a bound exceeds the
    last of the best.
    """
    room = allowed.room * cluster.device.memory
    every = list(meshes(job, cluster, allowed))
    numbers = count()
    waiting = [(_least_on(job, cluster, mesh, allowed), next(numbers), mesh, False) for mesh in every]
    heapify(waiting)
    found: dict[tuple[int, ...], Choice] = {}
    limit = inf
    while waiting and waiting[0][0] <= limit:
        _, _, layout, whole = heappop(waiting)
        if not whole:
            for one in on_mesh(layout, job, allowed):
                if least_held(job, one) <= room and (least := least_time(job, cluster, one)) <= limit:
                    heappush(waiting, (least, next(numbers), one, True))
            continue
        choice = weigh(job, cluster, layout, room=room)
        if choice is None or (choice.sizes in found and choice.time.total >= found[choice.sizes].time.total):
            continue
        found[choice.sizes] = choice
        if len(found) >= most:
            limit = nsmallest(most, (one.time.total for one in found.values()))[-1]
    best = tuple(nsmallest(most, found.values(), key=lambda choice: choice.time.total))
    return Found(best, None if best else _least(job, cluster, every, allowed))


def weigh(job: Job, cluster: Cluster, layout: Layout, *, room: float = inf) -> Choice | None:
    """Weigh ``layout``; None if it needs more ``room``, or its schedule rejects these sizes."""
    try:
        held = footprint(job, layout)
        return Choice(layout, held, step_time(job, cluster, layout)) if held.total <= room else None
    except ScheduleError:
        return None


def _least_on(job: Job, cluster: Cluster, mesh: Layout, allowed: Allowed) -> float:
    """Return a lower bound in seconds for layouts on ``mesh``."""
    again = min(allowed.recompute, key=lambda one: one is Recompute.FULL)
    return unhindered_time(job, cluster, replace(mesh, recompute=again))


def _least(job: Job, cluster: Cluster, every: list[Layout], allowed: Allowed) -> Choice | None:
    """Return the layout nearest to fitting, on the few meshes with the least memory before activations."""

    def bytes_held(mesh: Layout) -> float:
        return least_held(job, replace(mesh, zero=max(allowed.zero), recompute=allowed.recompute[-1]))

    near = [one for mesh in nsmallest(SHOWN, every, key=bytes_held) for one in on_mesh(mesh, job, allowed)]
    near.sort(key=lambda layout: least_held(job, layout))
    choices = [choice for one in near[:30] if (choice := weigh(job, cluster, one)) is not None]
    return min(choices, key=lambda choice: choice.footprint.total, default=None)


def meshes(job: Job, cluster: Cluster, allowed: Allowed) -> Iterator[Layout]:
    """Every legal way to divide all devices, and the batch into microbatches."""
    experts = job.model.experts
    expert_sizes = _divisors(experts.count) if experts and Kind.EXPERT in allowed.kinds else (1,)
    tensor = _divisors(min(cluster.per_node, cluster.devices)) if Kind.TENSOR in allowed.kinds else (1,)
    context = _divisors(cluster.devices) if Kind.CONTEXT in allowed.kinds and job.sequence >= LONG else (1,)
    deepest = min(job.model.layers, max(MOST_STAGES[name] for name in allowed.schedules))
    for tp, cp in product(tensor, context):
        rest, over = divmod(cluster.devices, tp * cp)
        for pp in _divisors(rest) if Kind.PIPELINE in allowed.kinds else (1,):
            if over or pp > deepest or job.batch % (rest // pp):
                continue
            for ep, micro in product(expert_sizes, allowed.micro):
                mesh = Layout(tp, cp, pp, rest // pp, ep, micro=micro)
                if not any(problems(mesh, job)):
                    yield mesh


def on_mesh(mesh: Layout, job: Job, allowed: Allowed) -> Iterator[Layout]:
    """The layouts that differ in schedule, recompute and ZeRO alone."""
    for zero, recompute in product(allowed.zero if mesh.shards > 1 else allowed.zero[:1], allowed.recompute):
        for schedule, virtual in _schedules(mesh.pp, allowed.schedules):
            in_rounds = virtual == 1 or schedule not in LOOPED or mesh.microbatches(job) % mesh.pp == 0
            if in_rounds and mesh.pp * virtual <= min(job.model.layers, MOST_STAGES[schedule]):
                yield replace(mesh, zero=zero, recompute=recompute, schedule=schedule, virtual=virtual)


def _schedules(pp: int, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for name in names if pp > 1 else ("1f1b",):
        for virtual in _CHUNKS if name == "interleaved" else (2,) if name in VEE else (1,):
            yield name, virtual


@cache
def _divisors(number: int) -> tuple[int, ...]:
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return tuple(sorted({*small, *(number // k for k in small)}))
