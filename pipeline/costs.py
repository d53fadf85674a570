"""Measured costs of actions and messages, and the simulator's prediction from them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import TypeVar

from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.program import deliveries
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.timeline import Timeline, simulate
from pipeproof.pipeline.trace import Span, Trace

Key = TypeVar("Key")


@dataclass(frozen=True)
class Costs:
    """Seconds of work by stage and kind, messages too, and of a message's way by (sender, receiver).

    A way lasts from the end of the send to the moment its user has the message.
    """

    work: Mapping[tuple[int, Kind], float]
    latency: Mapping[tuple[int, int], float]

    def of(self, action: Action | None) -> float:
        """Look up the action's work; 0 for None, and for unobserved actions."""
        return self.work.get((action.stage, action.kind), 0.0) if action is not None else 0.0


def costs_of(traces: Sequence[Trace]) -> Costs:
    """Medians over all microbatches in ``traces``, measured steps of one schedule.

    Only messages awaited since before their send count as ways; between ranks without any, the shortest way counts.
    """
    work: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    waited: dict[tuple[int, int], list[float]] = defaultdict(list)
    ways: dict[tuple[int, int], list[float]] = defaultdict(list)
    for trace in traces:
        for span in chain.from_iterable(trace.spans):
            work[span.action.stage, span.action.kind].append(span.worked)
        for delivery in deliveries(trace.schedule):
            sent, used = trace.by_action[delivery.send], trace.by_action[delivery.user]
            found = waited if used.began < sent.began else ways
            found[delivery.sender, delivery.receiver].append(max(0.0, used.worked_from - sent.ended))
    shortest = {pair: min(values) for pair, values in ways.items()}
    return Costs(_medians(work), shortest | _medians(waited))


def predict(schedule: Schedule, costs: Costs) -> Trace:
    """Simulate ``schedule`` with ``costs``: an action takes its receive, its own work and its send."""
    receives = {delivery.user: delivery.receive for delivery in deliveries(schedule)}
    sends = {delivery.maker: delivery.send for delivery in deliveries(schedule)}

    def duration(action: Action) -> float:
        return costs.of(receives.get(action)) + costs.of(action) + costs.of(sends.get(action))

    timeline = simulate(schedule, duration, latency=lambda *pair: costs.latency.get(pair, 0.0))
    rows = []
    for rank, actions in enumerate(schedule.ranks):
        row: list[Span] = []
        for action, at in zip(actions, timeline.starts[rank], strict=True):
            for part in filter(None, (receives.get(action), action, sends.get(action))):
                row.append(Span(rank, part, at, at + costs.of(part)))
                at += costs.of(part)
        rows.append(tuple(row))
    return Trace(schedule, tuple(rows))


def trace_of(timeline: Timeline) -> Trace:
    """Convert a simulation with free messages to a trace, in its own units."""
    times = zip(timeline.schedule.ranks, timeline.starts, timeline.ends, strict=True)
    spans = (tuple(map(Span, [rank] * len(row[0]), *row)) for rank, row in enumerate(times))
    return Trace(timeline.schedule, tuple(spans), in_seconds=False)


def _medians(samples: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    return {key: median(values) for key, values in samples.items()}
