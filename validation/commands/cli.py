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

from pipeproof.commands.case_commands import add_case_commands
from pipeproof.commands.ending import leave, run_command
from pipeproof.commands.init import add_init_command
from pipeproof.commands.option_parser import CommandParser, OptionParser, add, add_flag
from pipeproof.commands.outputs import Outputs, takes_standard_output
from pipeproof.commands.own_step import set_defaults
from pipeproof.commands.record_commands import add_record_commands
from pipeproof.commands.schedule_commands import add_schedule_commands
from pipeproof.reports.terminal import Manner, speaking
from pipeproof.wings import is_present

_STATUSES = (
    "Exit status: 0 pass, or done; 1 a wrong answer, a broken law, or nothing that fits; 2 bad usage, invalid input, "
    "or no room for output; 3 no verdict: a hang, a dead rank, something unknown; 130 interrupted: what was found "
    "until then is reported."
)


_GROUPS = {
    "check my step": ("init", "validate", "replay", "fuzz", "gate", "record", "compare"),
    "look at schedules": ("show", "check", "plan"),
    "choose a layout": ("advise",),
    "extend": ("mutate",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(lambda: _run(arguments))


def command() -> NoReturn:
    """The process that a shell starts."""
    leave(main())


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what could come next
        import argcomplete  # the extra "completion"

        argcomplete.autocomplete(parser)
    options = parser.parse_args(arguments)
    manner = Manner(options.color, options.quiet, options.verbose, takes_standard_output(options))
    with speaking(manner), Outputs.open(options.prog.rpartition(" ")[2], vars(options)) as options.outputs:
        return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="pipeproof",
        usage="%(prog)s [-h] [--help-all] [--version] COMMAND ...",
        description="Is a step of pipeline-parallel training right? It runs on ranks, and beside it on one device.",
        epilog=f"{_STATUSES} Defaults: the table [tool.pipeproof] of pyproject.toml. Completion: "
        "pip install 'pipeproof[completion]', then eval \"$(register-python-argcomplete pipeproof)\" in your shell.",
    )
    parser.add_argument("--version", action="version", version=f"pipeproof {version('pipeproof')}")
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", prog="pipeproof", parser_class=CommandParser, help=argparse.SUPPRESS
    )
    # In the order in which a user comes to need them.
    add_init_command(commands)
    add_case_commands(commands)
    add_record_commands(commands)
    add_schedule_commands(commands)
    if is_present("advise"):
        from pipeproof.commands.advise import add_advise_command

        add_advise_command(commands)
    listed = {one.dest: one for one in commands._choices_actions}
    for title, verbs in _GROUPS.items():
        parser.add_argument_group(title)._group_actions += [listed[verb] for verb in verbs if verb in listed]
    for verb, command in commands.choices.items():
        about = listed[verb].help or ""
        command.description = command.description or f"{about[:1].upper()}{about[1:]}."
        says = command.add_argument_group("what it says")
        loudness = says.add_mutually_exclusive_group()
        add_flag(loudness, "-q", "--quiet", says="say only what does not pass, and how it ended")
        add_flag(loudness, "-v", "--verbose", says="say all of what passes, and what ranks print")
        colours = "whether outcomes have colours (default auto: on a terminal, unless NO_COLOR is set)"
        add(says, "--color", None, colours, choices=("auto", "always", "never"), default="auto", rare=True)
        command.epilog = f"Exit status: 0 pass or done, 1 wrong, 2 bad usage, 3 no verdict. {command.further}"
    with suppress(FileNotFoundError):  # a folder that was removed meanwhile
        set_defaults(commands.choices, Path.cwd())
    return parser
