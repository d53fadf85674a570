"""What decides a simulated run, in words that a command line takes and a replay line gives back."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeproof.pipeline.transports import Transport
from pipeproof.worlds.kinds import SIMULATED
from pipeproof.worlds.simulated.adversaries import name_of
from pipeproof.worlds.simulated.guide import Guide


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
    to import anew. ``fine``: another may also be next wherever a rank calls a function of torch. ``room``: how many
    bytes the transport keeps of what one rank sends to another, where messages keep their order.
    """

    interleaving: int | Guide = 0
    transport: Transport = Transport.UNLIMITED
    timing: Timing = SLEEP_ALONE
    noted: bool = False
    own_modules: tuple[str, ...] = ()
    fine: bool = False
    room: int = 0


@dataclass(frozen=True)
class Simulation:
    """Of a case: so many interleavings, by their seeds, from the first on, over a transport.

    Or the one that a guide gives; or with ``most`` all that differ, but no more than so many. ``fine``: another rank
    may also be next wherever one calls a function of torch. ``room``: how many bytes of what one rank sends to another
    are kept until they are received, so that the send ends before; of transports that keep messages in order.
    """

    transport: Transport = Transport.UNLIMITED
    first: int | Guide = 0
    count: int = 1
    most: int | None = None
    fine: bool = False
    room: int = 0

    def __str__(self) -> str:
        first, by = self.first, self.decider
        decided = f"interleaving {first}" if isinstance(first, Guide) else f"seed {first} ({by})"
        room = f" with room for {self.room} bytes" if self.room else ""
        return f"{SIMULATED}, transport {self.transport.value}{room}, {decided}{', fine' if self.fine else ''}"

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
        return " ".join([f"--{name} {value}" for name, value in self._said] + ["--fine"] * self.fine)

    @property
    def pytest_options(self) -> str:
        """As pytest has it."""
        said = [f"--pipeproof-{name}={value}" for name, value in self._said]
        return " ".join(said + ["--pipeproof-fine"] * self.fine)

    @property
    def _said(self) -> tuple[tuple[str, object], ...]:
        room = (("room", self.room),) if self.room else ()
        return ("world", SIMULATED), ("transport", self.transport.value), *room, ("interleaving", self.first)
