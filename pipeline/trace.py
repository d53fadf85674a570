"""Times of a step's actions, measured or simulated, and the use of the step's time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from pipeproof.pipeline.action import COMPUTE, Action
from pipeproof.pipeline.columns import CODE, KINDS
from pipeproof.pipeline.schedule import Schedule


class Span(NamedTuple):
    """One action on its rank, from ``began`` to ``ended``; first it ``waited`` for a message."""

    rank: int
    action: Action
    began: float
    ended: float
    waited: float = 0.0

    @property
    def worked_from(self) -> float:
        """End of the action's wait."""
        return self.began + self.waited

    @property
    def worked(self) -> float:
        """Duration without the wait."""
        return self.ended - self.worked_from


@dataclass(frozen=True)
class Profile:
    """Seconds in a step on this rank.

    compute: inside the stages' forward and backward. idle: waiting for a message. communication: issuing sends and
    receives, packing, and waiting at the end for sends to be taken. The rest of ``step_s`` is the runtime's own time
    and, after the last backward, the reductions and the optimizer.
    """

    rank: int
    step_s: float
    compute_s: float
    communication_s: float
    idle_s: float

    @property
    def other_s(self) -> float:
        return self.step_s - self.compute_s - self.communication_s - self.idle_s


@dataclass(frozen=True)
class Trace:
    """Spans of a step, by rank and in running order; a rank's spans do not overlap.

    Times are in seconds, or in a simulation's units if not ``in_seconds``.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    in_seconds: bool = True

    @cached_property
    def began(self) -> float:
        """Start of the first rank."""
        return min((spans[0].began for spans in self.spans if spans), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """From the first beginning to the last end."""
        return max((spans[-1].ended for spans in self.spans if spans), default=0.0) - self.began

    @cached_property
    def by_action(self) -> dict[Action, Span]:
        """Every span by its action, unique in a step."""
        return {span.action: span for span in chain.from_iterable(self.spans)}

    def from_zero(self) -> "Trace":
        """Shift the first beginning to 0."""
        start = self.began
        moved = (
            tuple(span._replace(began=span.began - start, ended=span.ended - start) for span in spans)
            for spans in self.spans
        )
        return replace(self, spans=tuple(moved))

    def profiles(self) -> list[Profile]:
        """Divide every rank's makespan: computing, messages, and idle, the rest."""
        return [self._profile(rank, spans) for rank, spans in enumerate(self.spans)]

    def _profile(self, rank: int, spans: Iterable[Span]) -> Profile:
        compute = communication = 0.0
        for span in spans:
            if span.action.kind in COMPUTE:
                compute += span.worked
            else:
                communication += span.worked
        return Profile(rank, self.makespan, compute, communication, self.makespan - compute - communication)


def encode(spans: Iterable[tuple[Action, float, float, float]]) -> list[float]:
    """Encode one rank's spans, (action, began, ended, waited), as numbers."""
    return [
        number
        for (stage, kind, microbatch), *times in spans
        for number in (float(stage), float(CODE[kind]), float(microbatch), *times)
    ]


def decode(rank: int, numbers: Sequence[float], shift: float = 0.0) -> tuple[Span, ...]:
    """Decode spans of ``rank`` from ``encode``'s ``numbers``, ``shift`` later."""
    width = 6
    assert len(numbers) % width == 0, f"{len(numbers)} numbers are no whole spans of {width}"
    return tuple(
        Span(rank, Action(int(stage), KINDS[int(kind)], int(microbatch)), began + shift, ended + shift, waited)
        for stage, kind, microbatch, began, ended, waited in (
            numbers[k : k + width] for k in range(0, len(numbers), width)
        )
    )
