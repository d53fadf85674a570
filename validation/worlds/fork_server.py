"""The fork server: a process that imports once what all workers need, from which they are then forked in milliseconds.

It takes seconds to import that, and needs nobody's help: who knows early that ranks will run starts it early.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from types import ModuleType

from validation.worlds.launcher import under_torchrun

CONTEXT = multiprocessing.get_context("forkserver")


def start() -> None:
    """Start it, where there is none, and do not wait for it.

    Not under torchrun: there each core has more processes than it can serve already.
    """
    if not under_torchrun():
        with ready():
            pass


@contextlib.contextmanager
def ready() -> Iterator[None]:
    """The conditions under which a worker is started, and with the first one the fork server.

    The caller's script is out of sight: jobs travel by value, so a worker need not run the script again, which would
    cost an import of pytest or trap a script without a ``__main__`` guard. One thread: ranks share the machine.
    """
    CONTEXT.set_forkserver_preload(_preloaded())
    script, threads = sys.modules["__main__"], os.environ.get("OMP_NUM_THREADS")
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        _ensure_running()
        yield
    finally:
        sys.modules["__main__"] = script
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads


def _preloaded() -> list[str]:
    """What is imported for all workers.

    An optimizer imports torch._dynamo when it is made, which takes longer than all the rest. Under torchrun a server
    has one worker, which can as well import it if it makes one.
    """
    pytest = ["pytest"] if "pytest" in sys.modules else []
    return ["validation.worlds.preload", *pytest, *([] if under_torchrun() else ["torch._dynamo"])]


def _ensure_running() -> None:
    """Start the server where there is none, with Ctrl-C kept from it: that is for this process to decide on."""
    resource_tracker.ensure_running()  # the server starts it too, and would then undo the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
