"""What decides a simulated run, in words that a command line takes and a replay line gives back."""

from dataclasses import dataclass

from pipeproof.pipeline.transports import Transport
from pipeproof.worlds.kinds import SIMULATED
from pipeproof.worlds.simulated.adversaries import name_of


@dataclass(frozen=True)
class Simulation:
    """Of a case: so many interleavings, by their seeds, from the first on, over a transport."""

    transport: Transport = Transport.UNLIMITED
    first: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{SIMULATED}, transport {self.transport.value}, seed {self.first} ({name_of(self.first)})"

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
        return ("world", SIMULATED), ("transport", self.transport.value), ("interleaving", self.first)
