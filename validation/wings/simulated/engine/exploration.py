"""Exploration of every distinct interleaving: choice of further runs from past runs.

Source sets with sleep sets, from "Optimal dynamic partial order reduction" by Abdulla, Aronis, Jonsson and Sagonas
(POPL 2014): for two events whose order matters and can change, another run has the second before the first. Runs that
differ only in the order of unrelated events are one run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipeproof.pipeline.sizes import some
from pipeproof.wings.simulated.engine.decisions import Guide, preemptions
from pipeproof.wings.simulated.engine.events import Actor, Event


@dataclass(frozen=True)
class Course:
    """Events of a run, until it became ``redundant``. ``astray``: it left its guide."""

    events: Sequence[Event]
    redundant: bool = False
    astray: bool = False


@dataclass
class _Node:
    """A point in a run: the chosen event, actors to choose next time, and actors done or unnecessary."""

    event: Event
    asleep: dict[Actor, Event]
    todo: set[Actor] = field(default_factory=set)
    done: dict[Actor, Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.had(self.event)

    def had(self, event: Event) -> None:
        """Record the event chosen here."""
        self.event = event
        self.todo |= {event.actor, *event.rivals}
        self.done[event.actor] = event

    @property
    def left(self) -> list[Actor]:
        """Actors still to choose here."""
        return [one for one in self.todo if one not in self.done and one not in self.asleep]


class Exploration:
    """A search through a job's interleavings. ``found``: number of distinct runs. ``complete``: all are found.

    ``more``: the limit was reached first. ``astray``: the job does not repeat itself, so the number is unknown.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.found = 0
        self.ran = 0
        self.complete = False
        self.more = False
        self.astray = False
        self._nodes: list[_Node] = []

    def guides(self) -> Iterator[Guide]:
        """Yield a guide for each remaining run; call ``learn`` before the next."""
        guide: Guide | None = Guide()
        while guide is not None and self.ran < self.most and not self.astray:
            yield guide
            guide = self._following()
        self.complete = guide is None and not self.astray
        self.more = guide is not None and not self.astray

    def learn(self, course: Course | None) -> None:
        """Learn the course of the last requested run; None: unknown, because it did not end."""
        self.ran += 1
        if course is None or course.astray:
            self.astray = True
            return
        self.found += not course.redundant
        known = len(self._nodes)
        if known:
            self._nodes[-1].had(course.events[known - 1])
        for event in course.events[known:]:
            self._nodes.append(_Node(event, self._asleep() if self._nodes else {}))
        self._reverse(first=max(known - 1, 0))

    def _asleep(self) -> dict[Actor, Event]:
        """Return actors asleep after the last event: earlier sleepers, or rivals, unrelated to it."""
        node = self._nodes[-1]
        others = {**node.asleep, **node.done}
        return {one: e for one, e in others.items() if one != node.event.actor and not e.meets(node.event)}

    def _following(self) -> Guide | None:
        while self._nodes and not self._nodes[-1].left:
            self._nodes.pop()
        if not self._nodes:
            return None
        node, before = self._nodes[-1], [one.event for one in self._nodes[:-1]]
        chosen = Event(min(node.left, key=str), node.event.able)
        return Guide(preemptions([*before, chosen]), {**node.asleep, **node.done}, len(before))

    def _reverse(self, first: int) -> None:
        """For every event from ``first`` on: let it come, in another run, before what it need not come after."""
        clocks: list[dict[Actor, int]] = []
        last: dict[Actor, int] = {}
        for number, node in enumerate(self._nodes):
            event = node.event
            clock: dict[Actor, int] = {}
            for before in (*event.after, last.get(event.actor, -1)):
                if before >= 0:
                    _join(clock, clocks[before])
            for other in range(number - 1, -1, -1) if event.touches else ():
                earlier = self._nodes[other].event
                if clock.get(earlier.actor, -1) >= other or not earlier.meets(event):
                    continue
                if number >= first:
                    self._let_before(other, number, [*clocks, clock])
                _join(clock, clocks[other])
            clock[event.actor] = last[event.actor] = number
            clocks.append(clock)

    def _let_before(self, other: int, number: int, clocks: Sequence[dict[Actor, int]]) -> None:
        """Schedule a run in which event ``number`` takes the place of event ``other``."""
        node, actor = self._nodes[other], self._nodes[other].event.actor
        then = [k for k in range(other + 1, number) if clocks[k].get(actor, -1) < other] + [number]
        initials: dict[Actor, int] = {}
        for k in then:
            event = self._nodes[k].event
            if event.actor not in initials and all(clocks[k].get(one, -1) < at for one, at in initials.items()):
                initials[event.actor] = k
        if not node.todo.isdisjoint(initials):
            return
        able = [one for one in initials if one in node.event.able]
        node.todo |= {min(able, key=str)} if able else set(node.event.able)


def _join(clock: dict[Actor, int], other: dict[Actor, int]) -> None:
    for actor, number in other.items():
        clock[actor] = max(clock.get(actor, -1), number)


def describe_explorations(explorations: Sequence[Exploration]) -> str:
    """Describe searches of several jobs in a sentence; empty without a search."""
    if not explorations:
        return ""
    endings = {"more": "had more", "astray": "did not run the same way twice"}
    counts = {words: sum(getattr(one, name) for one in explorations) for name, words in endings.items()}
    left = [f"{some(count, 'case')} {words}" for words, count in counts.items() if count]
    if ended := sum(not (one.complete or one.more or one.astray) for one in explorations):
        left.append(f"{ended} ended at one that is no pass")
    ran = f"interleavings that differ: {sum(one.found for one in explorations)} ran"
    return f"{ran}, of {some(len(explorations), 'case')}; " + ("; ".join(left) or "there are no more")
