"""Launchers: torchrun's environment variables, and our own fork server for ranks.

The fork server imports all common modules once, then forks workers within milliseconds. Its start takes seconds and
needs no attention, so callers that expect ranks start it early.
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
_CROWD = 8  # ranks per processor, beyond which startup is slow
_PREFIXES = ("TORCHELASTIC_", "MASTER_", "ROLE_")


def under_torchrun() -> bool:
    """True if torchrun started this process as a rank."""
    return all(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"))


def reports() -> bool:
    """True if this process prints and writes files: always, except on torchrun's ranks above 0.

    A stray RANK variable silences no process.
    """
    return not under_torchrun() or os.environ["RANK"] == "0"


def describe_sharing(ranks: int) -> str:
    """Return ``4 ranks share 2 processors here``; empty without sharing."""
    processors = os.cpu_count() or 1
    return f"{ranks} ranks share {some(processors, 'processor')} here" if ranks > processors else ""


def warn_of_crowd(ranks: int) -> str:
    """Return a warning about many ranks; empty for few."""
    if under_torchrun() or ranks <= _CROWD * (os.cpu_count() or 1):
        return ""
    return f"{describe_sharing(ranks)}: this takes long"


def launch_environment() -> dict[str, str]:
    """Return the environment without launcher variables, for processes outside its ranks.

    Otherwise a new group's ranks would wait for an absent store.
    """
    return {name: text for name, text in os.environ.items() if name not in _RANKS and not name.startswith(_PREFIXES)}


def loopback() -> dict[str, str]:
    """Return environment variables for ranks on one host.

    Without them gloo resolves the host's name, on many laptops an address in another network.
    """
    interfaces = {name for _, name in socket.if_nameindex()}
    return {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in interfaces and "GLOO_SOCKET_IFNAME" not in os.environ else {}


@dataclass(frozen=True)
class Seat:
    """One rank's place in a world.

    device: as in ``World``. store: ``file:///path`` or ``tcp://host:port/prefix``. folder: receives stacks from signal
    handlers, and with ``silent`` the rank's output. environment: added to the caller's.
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
        """File for a silent rank's output."""
        return Path(self.folder, f"rank-{self.rank}.output")

    @property
    def stacks(self) -> Path:
        """File for a signal handler's stacks."""
        return Path(self.folder, f"rank-{self.rank}.stacks")

    def full_environment(self) -> dict[str, str]:
        """Return the worker's environment: the caller's current one, plus this seat's."""
        place = place_of(self.rank, self.ranks, self.local_rank, self.local_ranks)
        return (
            launch_environment() | place | {"OMP_NUM_THREADS": "1"} | dict(self.environment)
        )  # ranks share the machine


def place_of(rank: int, ranks: int, local_rank: int, local_ranks: int) -> dict[str, str]:
    """Return environment variables for a rank."""
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_ranks}
    return {name: str(number) for name, number in variables.items()}


def start_fork_server() -> None:
    """Start the fork server, if absent, without waiting.

    Skipped under torchrun: its processes already outnumber the cores.
    """
    if not under_torchrun():
        with fork_server():
            pass


@contextlib.contextmanager
def fork_server() -> Iterator[None]:
    """Set conditions for starting a worker, and the fork server before the first one.

    The caller's script stays hidden: jobs travel by value, so workers need not rerun it, which would import pytest or
    trap scripts without a ``__main__`` guard. One thread each: ranks share the machine.
    """
    # Optimizers import torch._dynamo, which takes longer than all else. Under torchrun a server has one worker, which
    # can import it on demand.
    more = [name for name in ("pytest",) if name in sys.modules] + ["torch._dynamo"] * (not under_torchrun())
    CONTEXT.set_forkserver_preload(["pipeproof.worlds.preload", *more])
    script, own = sys.modules["__main__"], {"OMP_NUM_THREADS": "1", **FORKED_LATER}
    before = {name: os.environ.get(name) for name in own}
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ.update(own)
    try:
        resource_tracker.ensure_running()  # the server would start it too, and undo the mask
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for this process to decide on
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield
    finally:
        sys.modules["__main__"] = script
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text
