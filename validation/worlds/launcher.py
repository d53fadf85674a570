"""What a launcher such as torchrun tells a process about ranks, through its environment."""

import os
import socket

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
