"""The command ``pipeproof``.

Exit status: 0 pass; 1 a wrong answer, or a broken law; 2 bad usage, invalid input, or no room for output; 3 no verdict
(a hang, a dead rank, something unknown, nothing exercised); 130 interrupted, by the signal; 141 where the reader of
standard output has stopped. What needs torch is imported by the commands that need it: ``show``, ``check``, ``plan``
and ``init`` start at once. Where ranks will run, the fork server imports its own torch meanwhile.
"""

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from pipeproof.commands.advise import add_advise_command
from pipeproof.commands.case_commands import add_case_commands
from pipeproof.commands.ending import ended, leave
from pipeproof.commands.init import add_init_command
from pipeproof.commands.option_parser import CommandParser, OptionParser
from pipeproof.commands.outputs import takes_standard_output
from pipeproof.commands.schedule_commands import add_schedule_commands
from pipeproof.commands.selection import STATUSES
from pipeproof.commands.team_defaults import set_defaults
from pipeproof.reports.terminal import Manner, speaking


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return ended(lambda: _run(arguments))


def command() -> NoReturn:
    """The process that a shell starts."""
    leave(main())


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what could come next
        import argcomplete  # the extra "completion"

        argcomplete.autocomplete(parser)
    options = parser.parse_args(arguments)
    with speaking(Manner(options.color, options.quiet, options.verbose, takes_standard_output(options))):
        return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="pipeproof",
        description="Runs pipeline schedules on real ranks beside a single-device reference.",
        epilog=f"{STATUSES} Defaults: the table [tool.pipeproof] of pyproject.toml. Completion: "
        "pip install 'pipeproof[completion]', then eval \"$(register-python-argcomplete pipeproof)\" in your shell.",
    )
    parser.add_argument("--version", action="version", version=f"pipeproof {version('pipeproof')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    add_case_commands(commands)
    add_schedule_commands(commands)
    add_advise_command(commands)
    add_init_command(commands)
    for command in commands.choices.values():
        _add_manner(command)
    with suppress(FileNotFoundError):  # a folder that was removed meanwhile
        set_defaults(commands.choices, Path.cwd())
    return parser


def _add_manner(parser: argparse.ArgumentParser) -> None:
    """How any command speaks."""
    says = parser.add_argument_group("what it says")
    loudness = says.add_mutually_exclusive_group()
    loudness.add_argument("-q", "--quiet", action="store_true", help="only what is no pass, and how it ended")
    loudness.add_argument("-v", "--verbose", action="store_true", help="all of what passes, and what ranks print")
    colors = ("auto", "always", "never")
    says.add_argument("--color", choices=colors, default="auto", help="(default auto: on a terminal, without NO_COLOR)")
