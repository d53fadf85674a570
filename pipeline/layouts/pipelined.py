"""What a schedule makes of a layout: how long a step takes, and how much is held at once, by ``plan``'s simulator."""

from dataclasses import dataclass
from functools import cache

from pipeproof.pipeline.layouts.layout import Job, Layout, Recompute
from pipeproof.pipeline.memory import peaks_of
from pipeproof.pipeline.partition import even
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import build
from pipeproof.pipeline.simulate import Times, simulate

# Schedules that advice chooses from: what they hold and their bubble no longer change once a pipeline is full.
OFFERED = ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half")
_FULL = 3  # times P microbatches fill a pipeline: within 1 % of whole steps, which a test holds


@dataclass(frozen=True)
class Pipelined:
    """``held[r]``: the most layers' activations of one microbatch that rank r holds at once.

    ``stretch``: how many times longer the step takes than if its layers were shared evenly and no rank ever waited.
    """

    held: tuple[float, ...]
    stretch: float


def pipelined(job: Job, layout: Layout) -> Pipelined:
    """The schedule of ``layout`` for the microbatches of ``job``."""
    again = 1.0 if layout.recompute is Recompute.FULL else 0.0
    return _simulated(
        layout.schedule, layout.pp, layout.virtual, layout.microbatches(job), job.model.layers, 1.0 + again
    )


@cache
def _simulated(name: str, ranks: int, virtual: int, microbatches: int, layers: int, backward_input: float) -> Pipelined:
    """T_F = T_W = 1 a layer, and T_I, which includes what is computed again.

    Long steps are not simulated whole: once a pipeline is full, P more microbatches add the same time again and again.
    """
    few = min(microbatches, _FULL * ranks + microbatches % ranks)
    times = Times(1.0, backward_input, 1.0, stages=tuple(map(float, even(layers, ranks * virtual))))
    time = simulate(_built(name, ranks, virtual, few), times).makespan
    if few < microbatches:
        round_more = time - simulate(_built(name, ranks, virtual, few - ranks), times).makespan
        time += round_more * (microbatches - few) / ranks
    peaks = peaks_of(_built(name, ranks, virtual, few).columns, sizes=times.stages)
    work = microbatches * layers / ranks * (2.0 + backward_input)
    return Pipelined(tuple(peak.value for peak in peaks), time / work)


@cache
def _built(name: str, ranks: int, virtual: int, microbatches: int) -> Schedule:
    return build(name, ranks=ranks, microbatches=microbatches, virtual=virtual)


def stages_of(layout: Layout, layers: int) -> tuple[tuple[range, int], ...]:
    """The layers of every stage, and its rank."""
    return _stages(layout.schedule, layout.pp, layout.virtual, layers)


@cache
def _stages(name: str, ranks: int, virtual: int, layers: int) -> tuple[tuple[range, int], ...]:
    placement = _built(name, ranks, virtual, ranks).placement
    first, found = 0, []
    for size, rank in zip(even(layers, len(placement)), placement, strict=True):
        found.append((range(first, first + size), rank))
        first += size
    return tuple(found)
