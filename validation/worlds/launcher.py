"""What a launcher such as torchrun tells a process about ranks, through its environment; and what ours tell theirs."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
_PREFIXES = ("TORCHELASTIC_", "MASTER_", "ROLE_")


def under_torchrun() -> bool:
    """Whether torchrun started this process as a rank."""
    return all(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"))


def reports() -> bool:
    """Whether this process tells the user and writes files: it does, unless torchrun's rank 0 does it for all ranks.

    A RANK that some other program left behind makes nobody silent.
    """
    return not under_torchrun() or os.environ["RANK"] == "0"


def launch_environment() -> dict[str, str]:
    """This process's environment without its launcher's words, for a process that is no rank of that launcher.

    Left in place they make the ranks of a new group wait for a store that nobody hosts.
    """
    return {name: text for name, text in os.environ.items() if name not in _RANKS and not name.startswith(_PREFIXES)}


def loopback() -> dict[str, str]:
    """Environment for ranks that are all on this host.

    Without it gloo asks what the host's name resolves to, which on many a laptop is an address of another network.
    """
    interfaces = {name for _, name in socket.if_nameindex()}
    return {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in interfaces and "GLOO_SOCKET_IFNAME" not in os.environ else {}


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
