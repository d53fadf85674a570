"""Discrete-event simulation of a schedule: makespan, bubbles and peak memory per rank."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from pipeline.action import Action, Kind
from pipeline.dataflow import Product, need_of, product_of, walk
from pipeline.schedule import Schedule

Durations = Callable[[Action], float]

_UNIT = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


def unit_durations(action: Action) -> float:
    """T_F = T_I = T_W = 1, so a full backward takes T_B = T_I + T_W = 2."""
    return _UNIT[action.kind]


@dataclass(frozen=True)
class Timeline:
    """When every action of ``schedule`` runs. Times are in the unit of the durations; ranks run in order.

    ``starts[r][k]`` and ``ends[r][k]`` belong to ``schedule.ranks[r][k]``. ``peaks[r]`` is the largest number of
    microbatch activations that rank r holds, counted per stage from F to B (or to W, see ``simulate``).
    """

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    peaks: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time spent computing, per rank."""
        return tuple(
            sum(end - start for start, end in zip(*spans, strict=True))
            for spans in zip(self.starts, self.ends, strict=True)
        )

    @property
    def global_bubble(self) -> float:
        """Makespan minus the largest busy time over ranks: the step ends when its slowest rank ends."""
        return self.makespan - max(self.busy)

    @property
    def local_bubble(self) -> float:
        """The largest, over ranks, of own end - own start - own busy time: the zero-bubble papers' bubble."""
        spans = zip(self.starts, self.ends, self.busy, strict=True)
        return max(ends[-1] - starts[0] - busy if ends else 0.0 for starts, ends, busy in spans)

    @property
    def bubble_fraction(self) -> float:
        """Global bubble over makespan; (P-1)/(M+P-1) for 1F1B with equal stages."""
        return self.global_bubble / self.makespan if self.makespan else 0.0


def simulate(
    schedule: Schedule,
    durations: Durations = unit_durations,
    *,
    latency: float = 0.0,
    weight_memory: float = 1.0,
) -> Timeline:
    """Run ``schedule`` on paper: each action starts when its rank is free and what it needs has arrived.

    ``latency`` is added to whatever crosses ranks. ``weight_memory`` is M_W / M_B, the share of an activation still
    held between I and W; with 1.0 the whole activation is held until W. Raises ``dataflow.Stuck``, a ScheduleError, for
    a schedule whose orders contradict. Linear in the number of actions.
    """
    starts: list[list[float]] = [[] for _ in schedule.ranks]
    ends: list[list[float]] = [[] for _ in schedule.ranks]
    ready: dict[Product, float] = {}
    placement = schedule.placement
    for rank, slot in walk(schedule.ranks, schedule.n_stages):
        action = schedule.ranks[rank][slot]
        start = ends[rank][-1] if slot else 0.0
        need = need_of(action, schedule.n_stages)
        if need is not None:
            start = max(start, ready[need] + (latency if placement[need.stage] != rank else 0.0))
        end = start + durations(action)
        starts[rank].append(start)
        ends[rank].append(end)
        product = product_of(action)
        if product is not None:
            ready[product] = end
    peaks = tuple(_peak(actions, weight_memory) for actions in schedule.ranks)
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)), peaks)


def _peak(actions: tuple[Action, ...], weight_memory: float) -> float:
    change = {
        Kind.FORWARD: 1.0,
        Kind.BACKWARD: -1.0,
        Kind.BACKWARD_INPUT: weight_memory - 1.0,
        Kind.BACKWARD_WEIGHT: -weight_memory,
    }
    return max(accumulate((change[action.kind] for action in actions), initial=0.0))
