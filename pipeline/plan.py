"""Choose a schedule for P ranks and M microbatches: simulate every family, fitting ones first, the trade in words.

One unit of memory is the activations of one microbatch on an average rank, 1/P of the model; one of its V stages holds
1/V of that. Times are those of an average rank's layers likewise, so schedules with different V compare. With the
layers' activations and weights (``Needs.activations``), memory is in their unit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipeproof.pipeline.memory import peaks_of
from pipeproof.pipeline.partition import balance, balance_within, costs_of
from pipeproof.pipeline.schedule import Schedule, ScheduleError
from pipeproof.pipeline.schedules import FAMILIES, LOOPED, build, virtuals
from pipeproof.pipeline.sizes import MOST_MICROBATCHES, MOST_RANKS, check_count, check_measure
from pipeproof.pipeline.timeline import Times, simulate

_SLACK = 1e-9  # rounding in a sum


@dataclass(frozen=True)
class Needs:
    """Requirements for a plan.

    memory: the most that a rank may hold, in units of above; None for any. times: T_F, T_I and T_W. layers: every
    layer's cost, to balance stages; empty for equal stages. weight_memory: M_W / M_B. activations: per layer, the
    memory of one microbatch from F to its backward, in bytes or whatever unit ``memory`` has. weights: per layer, the
    resident memory: parameters, gradients, the optimizer's state.
    """

    ranks: int
    microbatches: int
    memory: float | None = None
    times: tuple[float, float, float] = (1.0, 1.0, 1.0)
    layers: tuple[float, ...] = ()
    weight_memory: float = 1.0
    activations: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()

    @property
    def costs(self) -> tuple[float, ...]:
        """Costs by layer: equal if only their memory is known."""
        return self.layers or (1.0,) * len(self.activations)


@dataclass(frozen=True)
class Option:
    """One schedule. ``fails``: the constraint it fails; then figures may be missing (makespan 0)."""

    name: str
    virtual: int
    makespan: float = 0.0
    global_bubble: float = 0.0
    local_bubble: float = 0.0
    peaks: tuple[float, ...] = ()
    messages: int = 0
    split: tuple[int, ...] = ()
    fails: str = ""

    @property
    def label(self) -> str:
        """The name, with V if ranks may hold several stages."""
        return f"{self.name} V={self.virtual}" if self.name in LOOPED and self.virtual > 1 else self.name

    @property
    def percent(self) -> float:
        """Global bubble in percent of the makespan."""
        return 100 * self.global_bubble / self.makespan if self.makespan else 0.0


def plan(
    needs: Needs, *, virtual: Sequence[int] = (2, 4), progress: Callable[[str], object] = lambda name: None
) -> tuple[Option, ...]:
    """Simulate every family, looped ones for each V in ``virtual``: fitting ones by makespan and memory, then the rest.

    ``progress`` is called with each family's name before its turn. Raises ``ScheduleError`` for invalid counts, times
    or costs.
    """
    _check(needs)
    options = []
    for name in FAMILIES:
        progress(name)
        options += [_option(name, chunks, needs) for chunks in _virtuals(name, virtual)]
    return tuple(sorted(options, key=_rank))


def _check(needs: Needs) -> None:
    check_count("ranks", needs.ranks, most=MOST_RANKS)
    check_count("microbatches", needs.microbatches, most=MOST_MICROBATCHES)
    memory = () if needs.memory is None else (needs.memory,)
    above = {"times": needs.times, "layers": needs.layers, "activations": needs.activations, "memory": memory}
    for what, values in above.items():
        for value in values:
            check_measure(what, value)
    for what, values in {"weights": needs.weights, "weight_memory": (needs.weight_memory,)}.items():
        for value in values:
            check_measure(what, value, zero=True)
    if needs.weights and not needs.activations:
        raise ScheduleError("weights without activations: give both, in one unit, a number for every layer")
    for what, values in (("activations", needs.activations), ("weights", needs.weights)):
        if values and len(values) != len(needs.costs):
            raise ScheduleError(f"{what} has {len(values)} numbers: expected {len(needs.costs)}, one for every layer")


def _virtuals(name: str, virtual: Sequence[int]) -> Sequence[int]:
    if name not in LOOPED:
        return (virtuals(name),)
    return (1, *virtual) if name == "zb-h1" else virtual


def _rank(option: Option) -> tuple[bool, float, float, int]:
    return bool(option.fails), option.makespan, max(option.peaks, default=0.0), option.messages


def _option(name: str, virtual: int, needs: Needs) -> Option:
    try:
        schedule = build(name, ranks=needs.ranks, microbatches=needs.microbatches, virtual=virtual)
        splits = tuple(_splits(schedule, needs)) if needs.costs else ((),)
    except ScheduleError as error:
        return Option(name, virtual, fails=str(error))
    options = [_simulate(schedule, virtual, split, needs) for split in splits]
    return next((option for option in options if not option.fails), options[0])


def _splits(schedule: Schedule, needs: Needs) -> Iterator[tuple[int, ...]]:
    """The best balanced split, and the best among splits that leave each stage in its share of memory.

    With one stage on a rank its share is all, and the second split is the best that fits. Several stages share in
    proportion to each one's peak, first as if they peaked together as at equal sizes, then as if all did at once; the
    caller checks whether a rank really stays in its memory.
    """
    yield balance(needs.costs, schedule.n_stages)
    if needs.memory is None:
        return
    most = _most_held(schedule, needs.weight_memory)
    together = [peak.value for peak in peaks_of(schedule.columns, weight_memory=needs.weight_memory)]
    at_once = [sum(most[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.n_ranks)]
    for held in (together, at_once):
        rooms = [needs.memory * own / held[schedule.placement[stage]] for stage, own in enumerate(most)]
        found = _split_within(rooms, most, needs)
        if found is not None:
            yield found


def _split_within(rooms: Sequence[float], most: Sequence[float], needs: Needs) -> tuple[int, ...] | None:
    """The best balanced split with stage s holding at most ``rooms[s]``, with ``most[s]`` activations at its peak."""
    activations, weights = ([0.0, *accumulate(sizes)] for sizes in _sizes(needs))

    def fits(stage: int, first: int, end: int) -> bool:
        held = most[stage] * (activations[end] - activations[first]) + weights[end] - weights[first]
        return held <= rooms[stage] + _SLACK

    return balance_within(needs.costs, len(rooms), fits=fits)


def _most_held(schedule: Schedule, weight_memory: float) -> list[float]:
    """Peak activations of each stage alone."""
    columns = schedule.columns
    alone = (columns.take(columns.stage == stage) for stage in range(schedule.n_stages))
    return [max(peak.value for peak in peaks_of(each, weight_memory=weight_memory)) for each in alone]


def _sizes(needs: Needs) -> tuple[Sequence[float], Sequence[float]]:
    """Every layer's activations and weights, in the unit of ``memory``."""
    costs = needs.costs
    activations = needs.activations or tuple(cost * needs.ranks / sum(costs) for cost in costs)
    return activations, needs.weights or (0.0,) * len(costs)


def _simulate(schedule: Schedule, virtual: int, split: tuple[int, ...], needs: Needs) -> Option:
    times = held = (1 / virtual,) * schedule.n_stages
    weights = (0.0,) * schedule.n_stages
    if split:
        times = tuple(cost * needs.ranks / sum(needs.costs) for cost in costs_of(split, needs.costs))
        held, weights = (costs_of(split, sizes) for sizes in _sizes(needs))
    timeline = simulate(schedule, Times(*needs.times, stages=times))
    peaks = tuple(
        peak.value + sum(weights[stage] for stage in schedule.stages_of(rank))
        for rank, peak in enumerate(peaks_of(schedule.columns, weight_memory=needs.weight_memory, sizes=held))
    )
    fails = ""
    if needs.memory is not None and max(peaks) > needs.memory + _SLACK:
        fails = f"a rank holds {max(peaks):g}, more than {needs.memory:g}"
    return Option(
        schedule.name,
        virtual,
        timeline.makespan,
        timeline.global_bubble,
        timeline.local_bubble,
        peaks,
        timeline.messages,
        split,
        fails,
    )


COLUMNS = ("schedule", "time", "bubble", "%", "local", "memory", "per rank", "messages", "split", "")


def row(option: Option) -> tuple[str, ...]:
    """Format an option, a cell for each of ``COLUMNS``: the last names the constraint it fails."""
    if not option.makespan:
        return (option.label, *["-"] * 7, "", f"fails: {option.fails}")
    low, high = min(option.peaks), max(option.peaks)
    return (
        option.label,
        f"{option.makespan:.4g}",
        f"{option.global_bubble:.4g}",
        f"{option.percent:.1f}",
        f"{max(0.0, option.local_bubble):.4g}",
        f"{high:.4g}",
        "all" if low == high else f"{option.peaks[0]:.4g} .. {option.peaks[-1]:.4g}",
        str(option.messages),
        ",".join(map(str, option.split)),
        f"fails: {option.fails}" if option.fails else "",
    )


def trade(options: Sequence[Option]) -> str:
    """Compare in words the best option with the lighter one of least memory times time."""
    fitting = [option for option in options if not option.fails]
    if not fitting and not any(option.makespan for option in options):
        least = min(options, key=lambda option: option.virtual)
        return f"No schedule can be: {least.fails}"
    if not fitting:
        least = min((one for one in options if one.makespan), key=lambda one: max(one.peaks))
        return f"Nothing fits: {least.label} needs least, {max(least.peaks):.4g} of memory."
    best = fitting[0]
    lighter = [option for option in fitting if max(option.peaks) < max(best.peaks)]
    said = f"{best.label} is the fastest that fits: bubble {best.percent:.1f} %, {max(best.peaks):.4g} of memory"
    if not lighter:
        return f"{said}; nothing that fits needs less."
    other = min(lighter, key=lambda option: max(option.peaks) * option.makespan)
    saved = 1 - max(other.peaks) / max(best.peaks)
    slower = other.makespan / best.makespan - 1
    return f"{said}. {other.label} needs {saved:.0%} less memory and takes {slower:.0%} more time."
