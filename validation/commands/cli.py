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
from pipeproof.commands.bench_command import add_bench_command
from pipeproof.commands.case_commands import add_case_commands
from pipeproof.commands.ending import ended, leave
from pipeproof.commands.init import add_init_command
from pipeproof.commands.option_parser import CommandParser, OptionParser
from pipeproof.commands.outputs import takes_standard_output
from pipeproof.commands.primitive_commands import add_primitives_command
from pipeproof.commands.schedule_commands import add_schedule_commands
from pipeproof.commands.team_defaults import set_defaults
from pipeproof.reports.terminal import Manner, speaking

_STATUSES = (
    "Exit status: 0 pass, or done; 1 a wrong answer, a broken law, or nothing that fits; 2 bad usage, invalid input, "
    "or no room for output; 3 no verdict: a hang, a dead rank, something unknown; 130 interrupted: what was found "
    "until then is told."
)


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
        description="Is a step of pipeline-parallel training right? It runs on ranks, and beside it on one device.",
        epilog=f"{_STATUSES} Defaults: the table [tool.pipeproof] of pyproject.toml. Completion: "
        "pip install 'pipeproof[completion]', then eval \"$(register-python-argcomplete pipeproof)\" in your shell.",
    )
    parser.add_argument("--version", action="version", version=f"pipeproof {version('pipeproof')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    # In the order in which a user comes to need them.
    for add in (
        add_init_command,
        add_case_commands,
        add_schedule_commands,
        add_advise_command,
        add_primitives_command,
        add_bench_command,
    ):
        add(commands)
    for listed in commands._choices_actions:
        command, about = commands.choices[listed.dest], listed.help or ""
        command.description = command.description or f"{about[:1].upper()}{about[1:]}."
        command.epilog = _STATUSES
        _add_manner(command)
    with suppress(FileNotFoundError):  # a folder that was removed meanwhile
        set_defaults(commands.choices, Path.cwd())
    return parser


def _add_manner(parser: argparse.ArgumentParser) -> None:
    """How any command speaks."""
    says = parser.add_argument_group("what it says")
    loudness = says.add_mutually_exclusive_group()
    loudness.add_argument("-q", "--quiet", action="store_true", help="say only what does not pass, and how it ended")
    loudness.add_argument("-v", "--verbose", action="store_true", help="say all of what passes, and what ranks print")
    colors = ("auto", "always", "never")
    says.add_argument(
        "--color",
        choices=colors,
        default="auto",
        help="whether outcomes have colours (default auto: on a terminal, unless NO_COLOR is set)",
    )
