"""What decides a simulated run, in words that a command line takes and a replay line gives back, and what is drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeproof.pipeline.sizes import MOST_SEED
from pipeproof.pipeline.transports import RULES, Transport
from pipeproof.wings.simulated.engine.adversaries import name_of
from pipeproof.wings.simulated.engine.guide import Guide
from pipeproof.worlds.kinds import SIMULATED

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from pipeproof.own.case import Case

# From the one that waits least, so that shrinking moves to what everybody has.
EVERY = tuple(sorted(Transport, key=lambda one: (one is not Transport.UNLIMITED, RULES[one].blocking)))

_ROOMS = (0, 256, 4096)  # bytes: for no message of the smallest models, for some, and for several


@dataclass(frozen=True)
class Timing:
    """What takes time besides sleep. ``latency_s``: what a message takes on its way, in seconds. ``measured``: what a
    rank's thread computes takes as long as the processor needs for it; else no time."""

    latency_s: float = 0.0
    measured: bool = False


SLEEP_ALONE = Timing()


@dataclass(frozen=True)
class Manner:
    """How runs go: by a seed or a guide for all that is left open, over a transport.

    ``timing``: what takes time besides sleep. ``noted``: keep the course. ``own_modules``: packages that each rank is
    to import anew. ``room``: how many bytes the transport keeps of what one rank sends to another, where messages keep
    their order.
    """

    interleaving: int | Guide = 0
    transport: Transport = Transport.UNLIMITED
    timing: Timing = SLEEP_ALONE
    noted: bool = False
    own_modules: tuple[str, ...] = ()
    room: int = 0


@dataclass(frozen=True)
class Simulation:
    """Of a case: so many interleavings, by their seeds, from the first on, over a transport.

    Or the one that a guide gives; or with ``most`` all that differ, but no more than so many. ``room``: how many bytes
    of what one rank sends to another are kept until they are received, so that the send ends before; of transports that
    keep messages in order.
    """

    transport: Transport = Transport.UNLIMITED
    first: int | Guide = 0
    count: int = 1
    most: int | None = None
    room: int = 0

    def __str__(self) -> str:
        first, by = self.first, self.decider
        decided = f"interleaving {first}" if isinstance(first, Guide) else f"seed {first} ({by})"
        room = f" with room for {self.room} bytes" if self.room else ""
        return f"{SIMULATED}, transport {self.transport.value}{room}, {decided}"

    @property
    def decider(self) -> str:
        """Who decides what happens next, in words."""
        return "as told" if isinstance(self.first, Guide) else name_of(self.first)

    @property
    def seeds(self) -> Sequence[int | Guide]:
        """What decides each of them, unless they are all."""
        return (self.first,) if isinstance(self.first, Guide) else range(self.first, self.first + self.count)

    @property
    def options(self) -> str:
        """As a command line has the first of them."""
        return " ".join(f"--{name} {value}" for name, value in self._said)

    @property
    def pytest_options(self) -> str:
        """As pytest has it."""
        return " ".join(f"--pipeproof-{name}={value}" for name, value in self._said)

    @property
    def _said(self) -> tuple[tuple[str, object], ...]:
        room = (("room", self.room),) if self.room else ()
        return ("world", SIMULATED), ("transport", self.transport.value), *room, ("interleaving", self.first)


@dataclass(frozen=True)
class Decisions:
    """What a campaign draws beside each case: simulations like ``like``, with any seed, where ``seeds``, and any of
    ``transports``; where there are several of these, with some room or other, too.
    """

    like: Simulation
    seeds: bool
    transports: Sequence[Transport]

    def __str__(self) -> str:
        seeds = "seeds drawn" if self.seeds else str(self.like)
        return f"{seeds}, transports {', '.join(one.value for one in self.transports)}"

    def __call__(self, case: "Case") -> "SearchStrategy[Simulation]":
        """A strategy of what decides ``case``; it shrinks to the first transport and to seed 0.

        Every schedule of ours ends under every transport. torch's runtime posts messages that cross, which end where
        nobody waits there and then.
        """
        from hypothesis import strategies as st  # of a campaign alone

        from pipeproof.own.runtimes import OWN

        seeds = st.integers(0, MOST_SEED) if self.seeds else st.just(self.like.first)
        ending = [one for one in self.transports if case.runtime == OWN or not RULES[one].blocking]
        rooms = st.sampled_from(_ROOMS) if len(self.transports) > 1 else st.just(self.like.room)

        def decided(drawn: tuple[Transport, int | Guide, int]) -> Simulation:
            transport, first, room = drawn
            return replace(self.like, transport=transport, first=first, room=0 if RULES[transport].by_name else room)

        return st.tuples(st.sampled_from(ending), seeds, rooms).map(decided)
