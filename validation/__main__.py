"""Shell entry point: ``pipeproof``, ``python -m pipeproof`` and ``torchrun -m pipeproof``."""

import signal
import sys
from contextlib import suppress
from importlib.metadata import version
from typing import NoReturn


def start() -> NoReturn:
    """Run the command line. Ctrl-C exits quietly from the first line on, even during imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is output to finish
    if sys.argv[1:] == ["--version"]:  # needs no command
        with suppress(AttributeError, OSError):  # the command line reports unwritable output
            sys.stdout.write(f"pipeproof {version('pipeproof')}\n")
            sys.stdout.flush()
            sys.exit()
    from pipeproof.commands.cli import command

    command()


if __name__ == "__main__":
    start()
