"""Where a worker sits: which rank it is, on which device, and where it meets the other ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from validation.worlds.launcher import launch_environment


@dataclass(frozen=True)
class Seat:
    """One rank's place in a world.

    ``device`` is ``cpu`` or ``cuda``; ``store`` is ``file:///path`` or ``tcp://host:port/prefix``; ``folder`` receives
    the stacks that only a signal handler can write; ``environment`` is added to that of the caller.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    device: str
    store: str
    folder: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def stacks(self) -> Path:
        """The file for stacks written by a signal handler."""
        return Path(self.folder, f"rank-{self.rank}.stacks")

    def full_environment(self) -> dict[str, str]:
        """The worker's whole environment: the caller's as it is now, and what is particular to this seat."""
        places = {
            "RANK": self.rank,
            "WORLD_SIZE": self.ranks,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_ranks,
            "OMP_NUM_THREADS": 1,  # ranks share the machine
        }
        return launch_environment() | {name: str(number) for name, number in places.items()} | dict(self.environment)
