"""What decides a simulated run, in words that a command line takes and a replay line gives back."""

from dataclasses import dataclass

from pipeproof.pipeline.transports import Transport


@dataclass(frozen=True)
class Simulation:
    """Of a case: so many interleavings, by their seeds, from the first on, over a transport."""

    transport: Transport = Transport.UNLIMITED
    first: int = 0
    count: int = 1

    @property
    def options(self) -> str:
        """As a command line has the first of them."""
        return f"--world simulated --transport {self.transport.value} --interleaving {self.first}"
