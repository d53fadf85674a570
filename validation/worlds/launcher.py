"""What a launcher such as torchrun tells a process about ranks, and how ours starts theirs: from a fork server.

The fork server is a process that imports once what all workers need, from which they are then forked in milliseconds.
It takes seconds to import that, and needs nobody's help: who knows early that ranks will run starts it early.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType

from pipeproof.pipeline.sizes import some
from pipeproof.worlds.accelerator import FORKED_LATER

CONTEXT = multiprocessing.get_context("forkserver")
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
_CROWD = 8  # ranks on a processor: with more, it takes long until all have begun
_PREFIXES = ("TORCHELASTIC_", "MASTER_", "ROLE_")


def under_torchrun() -> bool:
    """Whether torchrun started this process as a rank."""
    return all(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"))


def reports() -> bool:
    """Whether this process tells the user and writes files: it does, unless torchrun's rank 0 does it for all ranks.

    A RANK that some other program left behind makes nobody silent.
    """
    return not under_torchrun() or os.environ["RANK"] == "0"


def shared(ranks: int) -> str:
    """``4 ranks share 2 processors here``; nothing where each has its own."""
    processors = os.cpu_count() or 1
    return f"{ranks} ranks share {some(processors, 'processor')} here" if ranks > processors else ""


def crowded(ranks: int) -> str:
    """What to say before so many ranks start; nothing where they are few enough."""
    if under_torchrun() or ranks <= _CROWD * (os.cpu_count() or 1):
        return ""
    return f"{shared(ranks)}: this takes long"


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

    ``device`` is as a world has it; ``store`` is ``file:///path`` or ``tcp://host:port/prefix``; ``folder`` receives
    the stacks that only a signal handler can write, and with ``silent`` what the rank prints; ``environment`` is added
    to that of the caller.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    device: str
    store: str
    folder: str
    environment: Mapping[str, str] = field(default_factory=dict)
    silent: bool = False

    @property
    def output(self) -> Path:
        """The file for what a silent rank prints."""
        return Path(self.folder, f"rank-{self.rank}.output")

    @property
    def stacks(self) -> Path:
        """The file for stacks written by a signal handler."""
        return Path(self.folder, f"rank-{self.rank}.stacks")

    def full_environment(self) -> dict[str, str]:
        """The worker's whole environment: the caller's as it is now, and what is particular to this seat."""
        place = place_of(self.rank, self.ranks, self.local_rank, self.local_ranks)
        return (
            launch_environment() | place | {"OMP_NUM_THREADS": "1"} | dict(self.environment)
        )  # they share the machine


def place_of(rank: int, ranks: int, local_rank: int, local_ranks: int) -> dict[str, str]:
    """What the environment says of a rank."""
    told = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_ranks}
    return {name: str(number) for name, number in told.items()}


def start_fork_server() -> None:
    """Start the fork server, where there is none, and do not wait for it.

    Not under torchrun: there each core has more processes than it can serve already.
    """
    if not under_torchrun():
        with fork_server():
            pass


@contextlib.contextmanager
def fork_server() -> Iterator[None]:
    """The conditions under which a worker is started, and with the first one the fork server.

    The caller's script is out of sight: jobs travel by value, so a worker need not run the script again, which would
    cost an import of pytest or trap a script without a ``__main__`` guard. One thread: ranks share the machine.
    """
    CONTEXT.set_forkserver_preload(_preloaded())
    script, own = sys.modules["__main__"], {"OMP_NUM_THREADS": "1", **FORKED_LATER}
    before = {name: os.environ.get(name) for name in own}
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ.update(own)
    try:
        _ensure_running()
        yield
    finally:
        sys.modules["__main__"] = script
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text


def _preloaded() -> list[str]:
    """What is imported for all workers.

    An optimizer imports torch._dynamo when it is made, which takes longer than all the rest. Under torchrun a server
    has one worker, which can as well import it if it makes one.
    """
    pytest = ["pytest"] if "pytest" in sys.modules else []
    return ["pipeproof.worlds.preload", *pytest, *([] if under_torchrun() else ["torch._dynamo"])]


def _ensure_running() -> None:
    """Start the server where there is none, with Ctrl-C kept from it: that is for this process to decide on."""
    resource_tracker.ensure_running()  # the server starts it too, and would then undo the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
