"""Traces in Chrome's trace event format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is described in "Trace Event Format" by N. Duca and D. Sinclair (2016). A trace is a process in it and a rank
a thread; an action is a complete event ("X"), and so is the wait at its beginning. A message is a flow: an arrow from
the slice around its start ("s") to the slice around its finish ("f").
"""

from collections.abc import Iterator, Mapping
from itertools import chain, count

from pipeproof.pipeline.action import COMPUTE
from pipeproof.pipeline.dataflow import need_of
from pipeproof.pipeline.program import deliveries
from pipeproof.pipeline.trace import Span, Trace

Event = dict[str, object]

# Names from the format's fixed palette, one per microbatch and then again: chrome://tracing heeds them.
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
# Perfetto does not (github.com/google/perfetto/issues/208 and 624). It makes a colour of a slice's name without its
# digits and the spaces before them (getColorForSlice in ui/src/components/colorizer.ts; hash in ui/src/base/hash.ts).
# So a letter goes with the name; with these ten, in this order, kinds and neighbouring microbatches get hues apart.
LETTERS = "ojxliytqaz"
_WAIT, _MESSAGE = "white", "grey"
# Viewers turn microseconds into whole nanoseconds. Eighths of one are whole in both, so no slice grows into the next.
_PER_US = 8
_US_PER_SECOND, _US_PER_UNIT = 1e6, 1e3


def chrome_trace(traces: Mapping[str, Trace]) -> dict[str, object]:
    """Convert ``traces``, by name, to one JSON object. A simulation's unit of time becomes 1 ms.

    Names come first, and then everything in time order; at one time, slices precede their arrows.
    """
    messages = count()  # an arrow's number is its own throughout the file
    processes = [_Process(number, trace) for number, trace in enumerate(traces.values())]
    names = chain.from_iterable(map(_Process.names, processes, traces))
    slices = chain.from_iterable(map(_Process.slices, processes))
    arrows = chain.from_iterable(process.arrows(messages) for process in processes)
    timed = sorted([*slices, *arrows], key=lambda event: float(str(event["ts"])))
    return {"traceEvents": [*names, *timed], "displayTimeUnit": "ms"}


class _Process:
    """A trace's events."""

    def __init__(self, number: int, trace: Trace) -> None:
        self._number = number
        self._trace = trace
        self._scale = _PER_US * (_US_PER_SECOND if trace.in_seconds else _US_PER_UNIT)

    def names(self, name: str) -> Iterator[Event]:
        yield {"ph": "M", "pid": self._number, "name": "process_name", "args": {"name": name}}
        for rank in range(len(self._trace.spans)):
            thread = {"ph": "M", "pid": self._number, "tid": rank}
            yield {**thread, "name": "thread_name", "args": {"name": f"rank {rank}"}}
            yield {**thread, "name": "thread_sort_index", "args": {"sort_index": rank}}

    def slices(self) -> Iterator[Event]:
        for span in chain.from_iterable(self._trace.spans):
            yield from self._wait(span)
            yield from self._work(span)

    def arrows(self, numbers: Iterator[int]) -> Iterator[Event]:
        """Draw arrows from the send's slice, or its maker's if sending takes no time, to the consumer's slice."""
        spans = self._trace.by_action
        for delivery in deliveries(self._trace.schedule):
            sent = spans.get(delivery.send)
            if sent is None or not self._lasts(sent):
                sent = spans[delivery.maker]
            message: Event = {"name": str(delivery.send), "cat": "message", "id": next(numbers)}
            yield {**self._event("s", sent, sent.worked_from), **message}
            used = spans[delivery.user]
            yield {**self._event("f", used, used.worked_from), **message, "bp": "e"}

    def _wait(self, span: Span) -> Iterator[Event]:
        until = self._at(span.worked_from) - self._at(span.began)
        if until:
            need = need_of(span.action, self._trace.schedule.n_stages)
            what: Event = {"name": f"wait for {need}", "cat": "idle", "cname": _WAIT}
            yield {**self._event("X", span, span.began), "dur": until, **what}

    def _work(self, span: Span) -> Iterator[Event]:
        stage, kind, microbatch = span.action
        name = str(span.action)
        if kind in COMPUTE:
            name += f" [{LETTERS[microbatch % len(LETTERS)]}]"
            what: Event = {"cat": "compute", "cname": COLOURS[microbatch % len(COLOURS)]}
        else:
            what = {"cat": "communication", "cname": _MESSAGE}
        if self._lasts(span):
            args = {"stage": stage, "kind": kind.value, "microbatch": microbatch}
            lasting: Event = {"dur": self._lasts(span), "name": name, "args": args}
            yield {**self._event("X", span, span.worked_from), **lasting, **what}

    def _event(self, phase: str, span: Span, time: float) -> Event:
        return {"ph": phase, "pid": self._number, "tid": span.rank, "ts": self._at(time)}

    def _lasts(self, span: Span) -> float:
        return self._at(span.ended) - self._at(span.worked_from)

    def _at(self, time: float) -> float:
        """``time`` in microseconds."""
        return round(time * self._scale) / _PER_US
