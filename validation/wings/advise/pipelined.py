"""A schedule's effect on a layout: time of a step and peak memory, by ``plan``'s simulator."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

from pipeproof.pipeline.memory import peaks_of
from pipeproof.pipeline.partition import even
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import LOOPED, build
from pipeproof.pipeline.timeline import Times, simulate
from pipeproof.wings.advise.layout import Job, Layout, Pipeline, Recompute
from pipeproof.wings.advise.transformer import Transformer

# Schedules that advice chooses from: what they hold and their bubble no longer change once a pipeline is full.
OFFERED = ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half")
# Of a pipeline that is simulated; public runs have up to 64 ranks. V-Half is drawn unit by unit, which takes longest.
MOST_STAGES: Mapping[str, int] = {**dict.fromkeys(OFFERED, 128), "v-half": 32}
_WHOLE = ("1f1b", "interleaved")  # with an unsplit backward
# Times P microbatches fill a pipeline: it is as slow as whole steps are, within 1 %, and holds as much. A test says so.
_FULL, _HOLDS = 3, 2
_DIGITS = 9  # digits in which equal stages agree

Stages = tuple[tuple[range, int], ...]


def stretch(job: Job, layout: Layout) -> float:
    """Return the ratio of a step's time to an even share without waits."""
    return _stretch(layout.pipeline, layout.microbatches(job), work(job, layout), _times(layout))


def least_stretch(job: Job, layout: Layout) -> float:
    """Return a lower bound on the ratio, from the busiest rank and the work before and after it."""
    return _least(layout.pipeline, layout.microbatches(job), work(job, layout), _times(layout))


def peaks(job: Job, layout: Layout, sizes: Sequence[float]) -> tuple[float, ...]:
    """The most that each rank holds at once, where a microbatch leaves ``sizes[stage]`` from F to B (or W)."""
    unit = max(sizes)
    alike = tuple(round(size / unit, _DIGITS) for size in sizes)
    few = min(layout.microbatches(job), _HOLDS * layout.pp)
    return tuple(peak * unit for peak in _peaks(layout.pipeline, few, alike))


def work(job: Job, layout: Layout) -> tuple[float, ...]:
    """Return each stage's work over the mean: its layers' forward operations, and in the last the output's."""
    return _work(job.model, job.sequence, layout.pipeline)


@cache
def _work(model: Transformer, sequence: int, pipeline: Pipeline) -> tuple[float, ...]:
    stages = stages_of(pipeline, model.layers)
    found = [sum(model.operations(layer, sequence) for layer in layers) for layers, _ in stages]
    found[-1] += model.output_operations
    mean = sum(found) / len(found)
    return tuple(round(one / mean, _DIGITS) for one in found)


def _times(layout: Layout) -> Times:
    """Return T_F = T_W = 1 for a mean stage, and T_I, which includes recomputation."""
    return _AGAIN if layout.recompute is Recompute.FULL else _ONCE


_ONCE, _AGAIN = Times(1.0, 1.0, 1.0), Times(1.0, 2.0, 1.0)


@cache
def _stretch(pipeline: Pipeline, microbatches: int, works: tuple[float, ...], times: Times) -> float:
    """Simulate a step's start, and extrapolate: in a full pipeline, each microbatch adds the same time."""
    few = min(microbatches, _FULL * pipeline.ranks)
    scaled = replace(times, stages=works)
    time = simulate(_build(pipeline, few), scaled).makespan
    if few < microbatches:
        round_more = time - simulate(_build(pipeline, few - pipeline.ranks), scaled).makespan
        time += round_more * (microbatches - few) / pipeline.ranks
    return max(time / _even(pipeline, microbatches, works, times), _least(pipeline, microbatches, works, times))


def _even(pipeline: Pipeline, microbatches: int, works: Sequence[float], times: Times) -> float:
    return microbatches * sum(works) / pipeline.ranks * _all(times)


def _all(times: Times) -> float:
    return times.forward + times.backward_input + times.backward_weight


@cache
def _least(pipeline: Pipeline, microbatches: int, works: tuple[float, ...], times: Times) -> float:
    """Return a lower bound: each rank does all its work after the first microbatch's arrival.

    An unsplit last backward must then still pass the earlier stages.
    """
    before = [0.0, *accumulate(works)]
    passes = _all(times) if pipeline.schedule in _WHOLE else times.forward
    busy, first = [0.0] * pipeline.ranks, dict[int, int]()
    for stage, (_, rank) in enumerate(stages_of(pipeline, len(works))):
        busy[rank] += microbatches * works[stage] * _all(times)
        first.setdefault(rank, stage)
    time = max(busy[rank] + passes * before[stage] for rank, stage in first.items())
    return time / _even(pipeline, microbatches, works, times)


@cache
def _peaks(pipeline: Pipeline, microbatches: int, sizes: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(peak.value for peak in peaks_of(_build(pipeline, microbatches).columns, sizes=sizes))


@cache
def _build(pipeline: Pipeline, microbatches: int) -> Schedule:
    return build(pipeline.schedule, ranks=pipeline.ranks, microbatches=microbatches, virtual=pipeline.virtual)


@cache
def stages_of(pipeline: Pipeline, layers: int) -> Stages:
    """Return the layers and the rank of every stage."""
    placement = _build(pipeline, pipeline.ranks if pipeline.schedule in LOOPED else 1).placement
    first, found = 0, []
    for size, rank in zip(even(layers, len(placement)), placement, strict=True):
        found.append((range(first, first + size), rank))
        first += size
    return tuple(found)
