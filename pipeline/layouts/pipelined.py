"""What a schedule makes of a layout: how long a step takes, and how much is held at once, by ``plan``'s simulator."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

from pipeproof.pipeline.layouts.layout import Job, Layout, Recompute
from pipeproof.pipeline.layouts.transformer import Transformer
from pipeproof.pipeline.memory import peaks_of
from pipeproof.pipeline.partition import even
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import build
from pipeproof.pipeline.simulate import Times, simulate

# Schedules that advice chooses from: what they hold and their bubble no longer change once a pipeline is full.
OFFERED = ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half")
MOST_STAGES = 128  # of a pipeline that is simulated; public runs have 2 to 64 ranks
_WHOLE = ("1f1b", "interleaved")  # those whose backward is in one piece
_FULL = 3  # times P microbatches fill a pipeline: within 1 % of whole steps, which a test holds
_DIGITS = 9  # to which sizes of stages are alike

Stages = tuple[tuple[range, int], ...]


def stretch(job: Job, layout: Layout) -> float:
    """How many times longer a step takes than if its work were shared evenly and no rank ever waited."""
    return _stretch(_few(job, layout), layout.microbatches(job), work(job, layout), _times(layout))


def least_stretch(job: Job, layout: Layout) -> float:
    """What that is at least, by the busiest rank and what must run before and after it."""
    stages = stages_of(layout, job.model.layers)
    time = _least(layout.schedule, stages, layout.microbatches(job), work(job, layout), _times(layout))
    return time / _even_time(layout, layout.microbatches(job), work(job, layout), _times(layout))


def peaks(job: Job, layout: Layout, sizes: Sequence[float]) -> tuple[float, ...]:
    """The most that each rank holds at once, where a microbatch leaves ``sizes[stage]`` from F to B (or W)."""
    unit = max(sizes)
    alike = tuple(round(size / unit, _DIGITS) for size in sizes)
    return tuple(peak * unit for peak in _peaks(_few(job, layout), alike))


def work(job: Job, layout: Layout) -> tuple[float, ...]:
    """Operations of each stage's forward for one token: its layers', and in the last the output's."""
    return _work(job.model, job.sequence, stages_of(layout, job.model.layers))


@cache
def _work(model: Transformer, sequence: int, stages: Stages) -> tuple[float, ...]:
    found = [sum(model.operations(layer, sequence) for layer in layers) for layers, _ in stages]
    found[-1] += model.output_operations
    mean = sum(found) / len(found)
    return tuple(round(one / mean, _DIGITS) for one in found)


def _times(layout: Layout) -> Times:
    """T_F = T_W = 1 for a stage of mean size, and T_I, which includes what is computed again."""
    return Times(1.0, 2.0 if layout.recompute is Recompute.FULL else 1.0, 1.0)


def _all(times: Times) -> float:
    return times.forward + times.backward_input + times.backward_weight


def _even_time(layout: Layout, microbatches: int, works: Sequence[float], times: Times) -> float:
    return microbatches * sum(works) / layout.pp * _all(times)


def _few(job: Job, layout: Layout) -> tuple[Layout, int]:
    """What of ``layout`` a schedule depends on, and as many microbatches as are simulated.

    Long steps are not simulated whole: once a pipeline is full, P more microbatches add the same time again and again.
    """
    count, ranks = layout.microbatches(job), layout.pp
    alone = Layout(pp=ranks, schedule=layout.schedule, virtual=layout.virtual)
    return alone, min(count, _FULL * ranks + count % ranks)


@cache
def _stretch(few: tuple[Layout, int], microbatches: int, works: tuple[float, ...], times: Times) -> float:
    layout, simulated = few
    scaled = replace(times, stages=works)
    time = simulate(_built(layout, simulated), scaled).makespan
    if simulated < microbatches:
        round_more = time - simulate(_built(layout, simulated - layout.pp), scaled).makespan
        time += round_more * (microbatches - simulated) / layout.pp
        stages = _stages(layout, len(works))
        time = max(time, _least(layout.schedule, stages, microbatches, works, times))
    return time / _even_time(layout, microbatches, works, times)


@cache
def _least(name: str, stages: Stages, microbatches: int, works: tuple[float, ...], times: Times) -> float:
    """No rank ends before it did all its work, which begins when the first microbatch has reached it.

    Where a backward is in one piece, the last one must then still pass the stages before.
    """
    before = [0.0, *accumulate(works)]
    passes = times.forward + (_all(times) - times.forward if name in _WHOLE else 0.0)
    busy: dict[int, float] = {}
    first: dict[int, int] = {}
    for stage, (_, rank) in enumerate(stages):
        busy[rank] = busy.get(rank, 0.0) + microbatches * works[stage] * _all(times)
        first.setdefault(rank, stage)
    return max(busy[rank] + passes * before[stage] for rank, stage in first.items())


@cache
def _peaks(few: tuple[Layout, int], sizes: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(peak.value for peak in peaks_of(_built(*few).columns, sizes=sizes))


@cache
def _built(layout: Layout, microbatches: int) -> Schedule:
    return build(layout.schedule, ranks=layout.pp, microbatches=microbatches, virtual=layout.virtual)


def stages_of(layout: Layout, layers: int) -> Stages:
    """The layers of every stage, and its rank."""
    return _stages(Layout(pp=layout.pp, schedule=layout.schedule, virtual=layout.virtual), layers)


@cache
def _stages(layout: Layout, layers: int) -> Stages:
    placement = _built(layout, layout.pp).placement
    first, found = 0, []
    for size, rank in zip(even(layers, len(placement)), placement, strict=True):
        found.append((range(first, first + size), rank))
        first += size
    return tuple(found)
