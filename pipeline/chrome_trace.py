"""Traces in Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is described in "Trace Event Format" by N. Duca and D. Sinclair (2016). A trace is a process in it and a rank
a thread; an action is a complete event ("X"), and so is the wait at its beginning. A message is a flow: an arrow from
the slice that holds its start ("s") to the one that holds its finish ("f").
"""

from collections.abc import Iterator, Mapping
from itertools import count

from pipeline.action import COMPUTE
from pipeline.dataflow import need_of
from pipeline.deliveries import deliveries
from pipeline.trace import Span, Trace

Event = dict[str, object]

# Names from the format's fixed palette; the microbatch chooses.
COLOURS = (
    "rail_response",
    "thread_state_iowait",
    "rail_load",
    "startup",
    "background_memory_dump",
    "terrible",
    "olive",
    "thread_state_running",
    "light_memory_dump",
    "bad",
)
_WAIT, _MESSAGE = "white", "grey"
# Viewers turn microseconds into whole nanoseconds. In eighths of one nothing is rounded, so no two slices overlap.
_STEPS_PER_US = 8
_US_PER_SECOND, _US_PER_UNIT = 1e6, 1e3


def chrome_trace(traces: Mapping[str, Trace]) -> dict[str, object]:
    """``traces``, by the names that they get, as one JSON object. A simulation's unit of time becomes 1 ms."""
    events: list[Event] = []
    messages = count()
    for process, (name, trace) in enumerate(traces.items()):
        events += _Process(process, trace, messages).events(name)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Process:
    """The events of one trace."""

    def __init__(self, number: int, trace: Trace, messages: Iterator[int]) -> None:
        self._number = number
        self._trace = trace
        self._messages = messages  # numbers for arrows, which no two of a file may share
        self._us = _US_PER_SECOND if trace.in_seconds else _US_PER_UNIT

    def events(self, name: str) -> list[Event]:
        """Names first, and then everything in the order of time; at one time a slice comes before its arrows."""
        slices = [event for spans in self._trace.spans for span in spans for event in self._slices(span)]
        timed = sorted([*slices, *self._flows()], key=lambda event: float(str(event["ts"])))
        return [*self._names(name), *timed]

    def _names(self, name: str) -> Iterator[Event]:
        yield {"ph": "M", "name": "process_name", "pid": self._number, "args": {"name": name}}
        for rank in range(len(self._trace.spans)):
            where = {"ph": "M", "pid": self._number, "tid": rank}
            yield {**where, "name": "thread_name", "args": {"name": f"rank {rank}"}}
            yield {**where, "name": "thread_sort_index", "args": {"sort_index": rank}}

    def _slices(self, span: Span) -> Iterator[Event]:
        action = span.action
        stage, kind, microbatch = action
        compute = kind in COMPUTE
        parts = (
            (f"wait for {need_of(action, self._trace.schedule.n_stages)}", "idle", span.began, span.worked_from, _WAIT),
            (
                str(action),
                "compute" if compute else "communication",
                span.worked_from,
                span.ended,
                COLOURS[microbatch % len(COLOURS)] if compute else _MESSAGE,
            ),
        )
        args = {"stage": stage, "kind": kind.value, "microbatch": microbatch}
        for name, category, began, ended, colour in parts:
            start, end = self._at(began), self._at(ended)
            if end > start:
                place = {"pid": self._number, "tid": span.rank}
                yield {"ph": "X", "name": name, "cat": category, "ts": start, "dur": end - start, **place,
                       "cname": colour, "args": args}  # fmt: skip

    def _flows(self) -> Iterator[Event]:
        """Arrows from the send's slice, or from its maker's where sending takes no time, to where it is used."""
        by_action = self._trace.by_action
        for delivery, number in zip(deliveries(self._trace.schedule), self._messages, strict=False):
            sent = by_action.get(delivery.send)
            if sent is None or self._at(sent.ended) == self._at(sent.worked_from):
                sent = by_action[delivery.maker]
            ends = (("s", sent, {}), ("f", by_action[delivery.user], {"bp": "e"}))
            for phase, span, binding in ends:
                place = {"pid": self._number, "tid": span.rank, "id": number}
                yield {"ph": phase, "name": str(delivery.send), "cat": "message", "ts": self._at(span.worked_from),
                       **place, **binding}  # fmt: skip

    def _at(self, time: float) -> float:
        return round(time * self._us * _STEPS_PER_US) / _STEPS_PER_US
