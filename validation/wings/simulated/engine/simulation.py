"""Settings of a simulated run, in the words of a command line and of a replay line, and their random draw."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeproof.pipeline.sizes import MOST_SEED
from pipeproof.pipeline.transports import RULES, Transport
from pipeproof.wings.simulated.engine.decisions import Guide, name_of
from pipeproof.worlds.kinds import SIMULATED

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from pipeproof.own.case import Case

# Ordered by waiting, least first: shrinking moves to the most common transport.
EVERY = tuple(sorted(Transport, key=lambda one: (one is not Transport.UNLIMITED, RULES[one].blocking)))

_ROOMS = (0, 256, 4096)  # bytes: for no message of the smallest models, for some, and for several


@dataclass(frozen=True)
class Timing:
    """Sources of delay besides sleep.

    ``latency_s``: a message's travel time. ``measured``: computation takes processor time; otherwise none.
    """

    latency_s: float = 0.0
    measured: bool = False


SLEEP_ALONE = Timing()


@dataclass(frozen=True)
class Simulation:
    """A choice of interleavings for a case: ``count`` seeds from the first on, over a transport.

    Or by a guide; or with ``most`` by all distinct interleavings, up to this number. ``room``: bytes buffered between
    two ranks until the receive, so the send ends earlier; for transports that keep messages in order.
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
        """The decider of the run, in words."""
        return "as given" if isinstance(self.first, Guide) else name_of(self.first)

    @property
    def seeds(self) -> Sequence[int | Guide]:
        """Seeds or guides to run; empty for an exploration of all."""
        return (self.first,) if isinstance(self.first, Guide) else range(self.first, self.first + self.count)

    @property
    def options(self) -> str:
        """Command line options for the first run."""
        return " ".join(f"--{name} {value}" for name, value in self._said)

    @property
    def pytest_options(self) -> str:
        """pytest options for the first run."""
        return " ".join(f"--pipeproof-{name}={value}" for name, value in self._said)

    @property
    def _said(self) -> tuple[tuple[str, object], ...]:
        room = (("room", self.room),) if self.room else ()
        return ("world", SIMULATED), ("transport", self.transport.value), *room, ("interleaving", self.first)


@dataclass(frozen=True)
class Decisions:
    """Draw simulations beside each case: like ``like``, with any seed, if ``seeds``, and any of ``transports``; with
    several transports, also a random room.
    """

    like: Simulation
    seeds: bool
    transports: Sequence[Transport]

    def __str__(self) -> str:
        seeds = "seeds drawn" if self.seeds else str(self.like)
        return f"{seeds}, transports {', '.join(one.value for one in self.transports)}"

    def __call__(self, case: "Case") -> "SearchStrategy[Simulation]":
        """Return a strategy for simulations of ``case``; it shrinks to the first transport and seed 0.

        Our schedules end under every transport. torch's runtime posts crossing messages, which end unless a rank waits
        at once.
        """
        from hypothesis import strategies as st  # of a campaign alone

        from pipeproof.own.runtimes import OWN

        seeds = st.integers(0, MOST_SEED) if self.seeds else st.just(self.like.first)
        ending = [one for one in self.transports if case.runtime == OWN or not RULES[one].blocking]
        rooms = st.sampled_from(_ROOMS) if len(self.transports) > 1 else st.just(self.like.room)

        def decide(transport: Transport, first: int | Guide, room: int) -> Simulation:
            return replace(self.like, transport=transport, first=first, room=0 if RULES[transport].by_name else room)

        return st.builds(decide, st.sampled_from(ending), seeds, rooms)
