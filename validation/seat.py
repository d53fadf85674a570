"""Where a worker sits: which rank it is, on which device, and where it meets the other ranks."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# torchrun's words to this process. They are not true of a worker, which would wait for a store that nobody hosts.
_LAUNCHER = ("TORCHELASTIC_", "MASTER_")


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
        """The worker's whole environment: the caller's as it is now, without its launcher's words, and the seat's."""
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(_LAUNCHER)}
        places = {
            "RANK": self.rank,
            "WORLD_SIZE": self.ranks,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_ranks,
            "OMP_NUM_THREADS": 1,  # ranks share the machine
        }
        return inherited | {name: str(number) for name, number in places.items()} | dict(self.environment)


def loopback() -> dict[str, str]:
    """Environment for ranks that are all on this host.

    Without it gloo asks what the host's name resolves to, which on many a laptop is an address of another network.
    """
    interfaces = {name for _, name in socket.if_nameindex()}
    return {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in interfaces and "GLOO_SOCKET_IFNAME" not in os.environ else {}
