"""Discrete-event simulation of a schedule: makespan, bubbles, memory, messages and the critical path.

Times add up along the longest path through the ranks' orders and the flow of data. A forward and a backward that
overlap (``Schedule.overlaps``) are one action here: it starts when both can start, takes the sum of both times and
hands both results on at its end. That is DualPipe's convention; were each result handed on by itself, DualPipeV's
global bubble would be (P-1) instead of 2(P-1) units.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.columns import KINDS, Columns, Floats, Ints
from pipeproof.pipeline.dataflow import flow, stuck, suppliers
from pipeproof.pipeline.memory import peaks_of
from pipeproof.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Times:
    """T_F, T_I and T_W of a stage; a full backward takes T_B = T_I + T_W. ``stages`` scales them, stage by stage."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    stages: tuple[float, ...] = ()

    def __call__(self, action: Action) -> float:
        return self._of_kind[action.kind] * (self.stages[action.stage] if self.stages else 1.0)

    @cached_property
    def _of_kind(self) -> Mapping[Kind, float]:
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward_input + self.backward_weight,
            Kind.BACKWARD_INPUT: self.backward_input,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
        }

    def of(self, columns: Columns) -> Floats:
        """Time of every entry in ``columns``."""
        times: Floats = np.array([self._of_kind.get(kind, 0.0) for kind in KINDS])[columns.kind]
        if self.stages:
            times *= np.array(self.stages)[columns.stage]
        return times


UNIT = Times()
Durations = Callable[[Action], float]
# What is added to a message: the same everywhere, or by (sending rank, receiving rank).
Latency = float | Mapping[tuple[int, int], float] | Callable[[int, int], float]


@dataclass(frozen=True)
class Timeline:
    """When every action of ``schedule`` runs. Times have the unit of the durations; ranks run in order.

    ``starts[r][k]`` and ``ends[r][k]`` belong to ``schedule.ranks[r][k]``. ``peaks[r]``: the largest number of
    microbatch activations on rank r, counted per stage from F to B (or to W, see ``simulate``). ``messages``: their
    number. ``critical_path``: (rank, slot) of a chain of actions without slack: each starts when the one before it on
    its rank ends, or when its need arrives, up to the last end.
    """

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    peaks: tuple[float, ...]
    messages: int
    critical_path: tuple[tuple[int, int], ...]

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @cached_property
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
    durations: Durations = UNIT,
    *,
    latency: Latency = 0.0,
    weight_memory: float = 1.0,
) -> Timeline:
    """Simulate ``schedule``: each action starts when its rank is free and its need has arrived.

    ``latency`` is added to every message across ranks. ``weight_memory`` is M_W / M_B, the share of an activation still
    held between I and W; with 1.0 the whole activation is held until W. Raises ``dataflow.Stuck``, a ScheduleError, for
    a schedule whose orders contradict. Linear in the number of actions.
    """
    columns, nodes = schedule.columns, schedule.nodes
    supplier = suppliers(columns, schedule.n_stages)
    times = durations.of(columns) if isinstance(durations, Times) else _each(durations, columns)
    graph = flow(columns, supplier, node=nodes)
    delays = _delays(columns.rank[graph.before], columns.rank[graph.after], latency)
    lasts = np.zeros(len(columns))
    np.add.at(lasts, nodes, times)
    begins, reached = graph.starts(lasts, delays)
    if not reached[nodes].all():
        raise stuck(columns, supplier, schedule.n_stages, reached[nodes])
    starts = begins[nodes]
    second = np.flatnonzero(nodes != np.arange(len(nodes)))
    starts[second] += times[nodes[second]]
    across = supplier >= 0
    return Timeline(
        schedule,
        _by_row(columns, starts),
        _by_row(columns, starts + times),
        tuple(peak.value for peak in peaks_of(columns, weight_memory=weight_memory)),
        int((columns.rank[supplier[across]] != columns.rank[across]).sum()),
        tuple(map(columns.cell, graph.critical_path(begins, lasts, delays))),
    )


def _each(durations: Durations, columns: Columns) -> Floats:
    actions = (columns.action(entry) for entry in range(len(columns)))
    return np.fromiter(map(durations, actions), np.float64, len(columns))


def _delays(sender: Ints, receiver: Ints, latency: Latency) -> Floats:
    """Delay between a product's making and its use: zero on one rank."""
    apart = sender != receiver
    if isinstance(latency, int | float):
        return np.where(apart, float(latency), 0.0)
    delays = np.zeros(len(sender))
    pairs, which = np.unique(np.stack([sender[apart], receiver[apart]]), axis=1, return_inverse=True)
    of = latency if callable(latency) else lambda *pair: latency[pair]
    delays[apart] = np.array([of(*pair) for pair in pairs.T.tolist()], dtype=float)[which.ravel()]
    return delays


def _by_row(columns: Columns, values: Floats) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(values[start:end].tolist()) for start, end in columns.spans())
