"""The process that a shell starts: ``pipeproof``, ``python -m pipeproof`` and ``torchrun -m pipeproof`` are one."""

import signal
import sys
from contextlib import suppress
from importlib.metadata import version
from typing import NoReturn


def start() -> NoReturn:
    """Run the command line. Ctrl-C ends the process quietly from the first line on, also while the rest is imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to tell
    if sys.argv[1:] == ["--version"]:  # the one thing to say for which no command is loaded
        with suppress(AttributeError, OSError):  # of what cannot be written to, the command line tells
            sys.stdout.write(f"pipeproof {version('pipeproof')}\n")
            sys.stdout.flush()
            sys.exit()
    from pipeproof.commands.cli import command

    command()


if __name__ == "__main__":
    start()
