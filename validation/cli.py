"""The command ``pipeproof``.

Exit status: 0 pass; 1 a wrong answer, or a broken law; 2 bad usage, invalid input, or no room for output; 3 no verdict
(a hang, a dead rank, something unknown, nothing exercised, interrupted); 141 where the reader of standard output has
stopped. What needs torch is imported by the commands that need it: ``show``, ``check``, ``plan`` and ``init`` start at
once. Where ranks will run, the fork server imports its own torch meanwhile.
"""

import argparse
from collections.abc import Sequence
from importlib.metadata import version

from pipeproof.commands.case_commands import add_case_commands
from pipeproof.commands.ending import ended
from pipeproof.commands.init import add_init_command
from pipeproof.commands.option_parser import OptionParser
from pipeproof.commands.schedule_commands import add_schedule_commands
from pipeproof.commands.selection import STATUSES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return ended(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="pipeproof",
        description="Runs pipeline schedules on real ranks beside a single-device reference.",
        epilog=STATUSES,
    )
    parser.add_argument("--version", action="version", version=f"pipeproof {version('pipeproof')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_case_commands(commands)
    add_schedule_commands(commands)
    add_init_command(commands)
    return parser
