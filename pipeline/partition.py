"""Splits of layers into stages."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.sizes import MOST_LAYERS, check_count, some

Fits = Callable[[int, int, int], bool]
Best = tuple[float, float, tuple[int, ...]]


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, as even as possible, larger stages first: even(7, 3) is (3, 2, 2)."""
    check_count("layers", layers, most=MOST_LAYERS)
    if not 1 <= stages <= layers:
        raise ScheduleError(
            f"{some(layers, 'layer')} cannot fill {some(stages, 'stage')}: use 1 to {layers} stages (ranks x virtual), "
            "or more layers"
        )
    size, larger = divmod(layers, stages)
    return tuple(size + (stage < larger) for stage in range(stages))


def balance(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Layers per stage with the cheapest most expensive stage; ties go to the most even split.

    ``costs`` are the layers' measured times, or their sizes. Exact, by dynamic programming over (stages, layers): the
    linear partition problem, with the sum of squares to choose among equals.
    """
    even(len(costs), stages)  # refuses counts that cannot be
    found = balance_within(costs, stages, fits=lambda stage, first, end: True)
    assert found is not None, "where everything fits there is a split"
    return found


def balance_within(costs: Sequence[float], stages: int, *, fits: Fits) -> tuple[int, ...] | None:
    """Balance among splits whose stages all fit; None without any.

    ``fits(stage, first, end)`` says whether that stage can hold layers first..end-1.
    """
    layers = len(costs)
    total = [0.0, *accumulate(costs)]
    # best[k]: largest cost, sum of squares and cuts of the first k layers in as many stages as rounds so far.
    best: list[Best | None] = [(0.0, 0.0, ()), *[None] * layers]
    for stage in range(stages):
        best = [
            min(
                (
                    _extend(before, total[k] - total[cut], cut)
                    for cut in range(stage, k)
                    if (before := best[cut]) is not None and fits(stage, cut, k)
                ),
                default=None,
            )
            for k in range(layers + 1)
        ]
    last = best[layers]
    return None if last is None else tuple(later - earlier for earlier, later in pairwise([*last[2], layers]))


def _extend(best: Best, cost: float, cut: int) -> Best:
    largest, squares, cuts = best
    return max(largest, cost), squares + cost * cost, (*cuts, cut)


def costs_of(sizes: Sequence[int], costs: Sequence[float]) -> tuple[float, ...]:
    """Cost of each stage with ``sizes`` layers."""
    ends = [0, *accumulate(sizes)]
    return tuple(sum(costs[start:end]) for start, end in pairwise(ends))


def by_sizes(layers: int, stages: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return ``sizes`` if valid: one per stage, each at least 1, together all layers."""
    text = ",".join(map(str, sizes))
    if len(sizes) != stages:
        raise ScheduleError(
            f"split {text} has {some(len(sizes), 'size')}: expected {stages}, one per stage (ranks x virtual)"
        )
    for stage, size in enumerate(sizes):
        if size < 1:
            raise ScheduleError(f"split {text} leaves stage {stage} with {size} layers: every stage needs at least 1")
    if sum(sizes) != layers:
        raise ScheduleError(f"split {text} sums to {sum(sizes)}: the model has {layers} layers")
    return tuple(sizes)


def parse_split(text: str, *, layers: int, stages: int) -> tuple[int, ...]:
    """Parse ``even``, or sizes like ``3,1,2,2``, into layers per stage."""
    if text.strip().lower() == "even":
        return even(layers, stages)
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        raise ScheduleError(f"split {text!r} is neither 'even' nor sizes such as 3,1,2,2") from None
    return by_sizes(layers, stages, sizes)
