"""Defaults that a team shares: the table ``[tool.pipeproof]`` of the nearest pyproject.toml.

A key is an option of any command, ``timeout = 60``; in ``[tool.pipeproof.fuzz]`` it is for that command alone.
"""

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeproof.commands.option_parser import UsageError
from pipeproof.commands.outputs import OutPath
from pipeproof.pipeline.schedules import list_known

FILE = "pyproject.toml"


def find_file(folder: Path) -> Path | None:
    """The file in ``folder``, or the next one above."""
    return next((one / FILE for one in (folder, *folder.parents) if (one / FILE).is_file()), None)


def set_defaults(commands: Mapping[str, argparse.ArgumentParser], folder: Path) -> None:
    """Give ``commands`` the defaults that the file for ``folder`` has. Raises ``UsageError``."""
    if (path := find_file(folder)) is None:
        return
    table = {key: value for key, value in read_table(path).items() if key != "steps"}  # which own_step.py reads
    own = {name: table.pop(name) for name in list(table) if name in commands and isinstance(table[name], dict)}
    _apply(table, commands, f"{path}: [tool.pipeproof]")
    for name, keys in own.items():
        _apply(keys, {name: commands[name]}, f"{path}: [tool.pipeproof.{name}]")


def read_table(path: Path) -> dict[str, Any]:
    """The table ``[tool.pipeproof]``. Raises ``UsageError`` for what cannot be read."""
    try:
        found = tomllib.loads(path.read_text()).get("tool", {}).get("pipeproof", {})
    except (OSError, ValueError) as error:  # also what is no TOML, or no UTF-8
        raise UsageError(f"cannot read {path}: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: tool.pipeproof is {found!r}: expected a table")
    return dict(found)


def _apply(table: Mapping[str, Any], commands: Mapping[str, argparse.ArgumentParser], where: str) -> None:
    options = [
        (option[2:], command, action)
        for command in commands.values()
        for action in command._actions
        for option in action.option_strings
        if option.startswith("--") and option != "--help"
    ]
    for key, value in table.items():
        actions = [(command, action) for option, command, action in options if option == key]
        if not actions and isinstance(value, dict):
            raise UsageError(f"{where[:-1]}.{key}] is of no command: {list_known(key, list(commands))}")
        if not actions:
            hint = list_known(key, sorted({option for option, *_ in options}))
            raise UsageError(f"{where} has {key!r}, which is no option: {hint}")
        for command, action in actions:
            command.set_defaults(**{action.dest: _convert(action, value, f"{where} {key} = {value!r}")})
            said = (action.help or "").partition("(default")[0].rstrip()
            action.help = f"{said} (default {_text(value)}, by {FILE})".lstrip().replace("%", "%%")


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _convert(action: argparse.Action, value: Any, message: str) -> Any:
    """``value`` as the option would have it."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{message}: expected true or false")
        return value
    if isinstance(value, bool | dict) or (action.type is OutPath and not isinstance(value, str)):
        expected = "the name of a file" if action.type is OutPath else "a number or text"
        raise UsageError(f"{message}: expected {expected}")
    text = _text(value)
    convert = action.type if callable(action.type) else str
    try:
        found = convert(text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"{message}: {str(error).removeprefix(f'{text!r}: ')}") from None
    if action.choices is not None and found not in action.choices:
        raise UsageError(f"{message}: {list_known(text, list(map(str, action.choices)))}")
    return [found] if isinstance(action, argparse._AppendAction) else found
