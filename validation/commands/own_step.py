"""What pyproject.toml says: defaults that a team shares, and the user's own steps, which a line may name, too.

A key of ``[tool.pipeproof]`` is an option of any command, ``timeout = 60``; in ``[tool.pipeproof.fuzz]`` it is for that
command alone. ``[tool.pipeproof.steps]`` says where a step and its reference are.

``OwnStep`` is text and numbers, and is checked before anything of the user's is imported. ``load`` imports it.
"""

import argparse
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from pipeproof.commands.option_parser import UsageError, add, whole
from pipeproof.commands.outputs import OutPath
from pipeproof.pipeline.schedules import list_known
from pipeproof.pipeline.sizes import MOST_PROCESSES, is_number
from pipeproof.whitebox.places import EXPECTED, call, find_place, is_place

FILE = "pyproject.toml"


def find_file(folder: Path) -> Path | None:
    """The file in ``folder``, or the next one above."""
    return next((one / FILE for one in (folder, *folder.parents) if (one / FILE).is_file()), None)


def set_defaults(commands: Mapping[str, argparse.ArgumentParser], folder: Path) -> None:
    """Give ``commands`` the defaults that the file for ``folder`` has. Raises ``UsageError``."""
    if (path := find_file(folder)) is None:
        return
    table = {key: value for key, value in read_table(path).items() if key != "steps"}
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


_KEYS = {
    "step": "the function that every rank calls",
    "reference": "what builds the whole model on one device",
    "microbatches": "what makes the data, or a list of it",
    "ranks": "how many ranks the step takes",
    "loss_fn": "the loss of an output and a target",
    "optimizer": "what makes the reference's optimizer of the model",
    "contract": "a pipeproof.Contract: what the step claims",
}
_NEEDED, _OPTIONAL = [*_KEYS][:4], [*_KEYS][4:]
_KNOWN = [*_KEYS, "timeout", "fuzz"]
_OPTIONS = {key: f"--{key.replace('_', '-')}" for key in _KEYS if key != "step"}
_MADE = {"microbatches": "a list, or a function that makes one", "contract": "a pipeproof.Contract"}
_EXPECTED = {**_MADE, "reference": "a function that builds the model, or a StageByStage"}  # others: a function
_RANKS = f"from 1 to {MOST_PROCESSES}, a list with the replica of each rank, or a mesh as {{pp = 2, dp = 2}}"


class StepError(ValueError):
    """A step of the user's that is not described, or not there."""


@dataclass(frozen=True)
class OwnStep:
    """What ``whitebox.validate`` is given, each as the place where it is: ``module:name``, or ``file.py:name``.

    ``origin`` begins each sentence about it; ``folder`` is where places are looked for; ``typed`` and ``options`` are
    what to type for it; ``given["fuzz"]`` is what ``whitebox.fuzz`` is given besides. Raises ``StepError`` for what
    cannot be.
    """

    name: str
    origin: str
    folder: Path
    typed: str
    given: Mapping[str, Any]
    options: str = ""

    def __post_init__(self) -> None:
        for key, what in _KEYS.items():
            value = self.given.get(key, "")
            such = (
                "2" if key == "ranks" else f'"tests.my_pipeline:{"build_model" if key == "reference" else f"my_{key}"}"'
            )
            if key in _NEEDED and value in ("", 0):
                raise StepError(f"{self.origin} has no {key}, {what}: add {key} = {such}")
            if key in self.given and key != "ranks" and not is_place(value):
                raise StepError(f"{self._said(key)}: expected {EXPECTED}, as {such}")
        ranks = self.given["ranks"]
        parts = ranks.values() if isinstance(ranks, Mapping) else ranks if isinstance(ranks, list) else [ranks]
        least = 0 if isinstance(ranks, list) else 1
        if not parts or any(type(one) is not int or not least <= one <= MOST_PROCESSES for one in parts):
            raise StepError(f"{self._said('ranks')}: expected a number {_RANKS}")
        if not is_number(self.given.get("timeout", 1), zero=False):
            raise StepError(f"{self._said('timeout')}: expected seconds above 0, as 60")
        if not isinstance(self.given.get("fuzz", {}), Mapping):
            raise StepError(f"{self._said('fuzz')}: expected a table, as {{microbatches = [1, 2, 4]}}")

    @property
    def processes(self) -> int:
        """How many ranks it takes."""
        ranks = self.given["ranks"]
        return prod(ranks.values()) if isinstance(ranks, Mapping) else ranks if isinstance(ranks, int) else len(ranks)

    def replay(self, case: str = "") -> str:
        """The line that runs it again; ``case``: as it was drawn by a campaign."""
        return " ".join(filter(None, ("pipeproof replay", self.typed, case, self.options)))

    def load(self) -> dict[str, Any]:
        """The arguments of ``whitebox.validate``, ``step`` among them. Raises ``ValueError`` for what is not there."""
        from pipeproof.core.contract import Contract  # torch comes with it
        from pipeproof.whitebox.expectation import Expectation

        kinds = {"microbatches": Sequence, "contract": Contract, "reference": Expectation}
        found: dict[str, Any] = {"ranks": self.given["ranks"]}
        if "timeout" in self.given:
            found["timeout_s"] = self.given["timeout"]
        for key in (key for key in _KEYS if key in self.given and key != "ranks"):
            value = find_place(self.given[key], self.folder, self._said(key))
            value = call(value, self._said(key)) if key in _MADE else value
            if not (isinstance(value, kinds.get(key, ())) or (callable(value) and key not in _MADE)):
                short = repr(value) if len(repr(value)) < 40 else type(value).__name__
                raise StepError(f"{self._said(key)} is {short}: expected {_EXPECTED.get(key, 'a function')}")
            found[key] = value
        return found

    def load_fuzz(self) -> dict[str, Any]:
        """What ``whitebox.fuzz`` is given besides: the table ``fuzz``, in which a place stands for what is there."""
        return {
            key: find_place(value, self.folder, f"{self.origin} fuzz.{key} = {value!r}") if is_place(value) else value
            for key, value in self.given.get("fuzz", {}).items()
        }

    def _said(self, key: str) -> str:
        return f"{self.origin} {key} = {self.given[key]!r}"


def steps_of(folder: Path) -> dict[str, OwnStep]:
    """The steps that the nearest pyproject.toml describes, by name. Raises ``StepError`` for one that cannot be."""
    if (path := find_file(folder)) is None:
        return {}
    where, table = f"{path}: [tool.pipeproof.steps", read_table(path).get("steps", {})
    if not isinstance(table, dict):
        raise StepError(f"{where}] is {table!r}: expected tables, as [tool.pipeproof.steps.my-step]")
    found = {}
    for name, entry in table.items():
        origin = f"{where}.{name}]"
        if not isinstance(entry, dict):
            raise StepError(f"{origin} is {entry!r}: expected a table with {', '.join(_NEEDED)}")
        if not re.fullmatch(r"[A-Za-z][\w-]*", name):
            raise StepError(f"{origin}: {name!r} is no name of a step: expected letters, digits, _ and -")
        if unknown := next((key for key in entry if key not in _KNOWN), None):
            raise StepError(f"{origin} has {unknown!r}, which is no key of a step: {list_known(unknown, _KNOWN)}")
        found[name] = OwnStep(name, origin, path.parent, name, entry)
    return found


def add_step(parser: argparse.ArgumentParser, *, positional: bool = True, shape: bool = False) -> None:
    """A step of the user's, in place of built-in schedules; ``shape``: ranks and microbatches are options already."""
    if positional:
        named = "a step of yours: its name in [tool.pipeproof.steps] of pyproject.toml, or file.py:function"
        add(parser, "step", "STEP", f"{named}; without one, the built-in schedules", nargs="?", known=_known)
    about = "each PLACE is module:name, or file.py:name"
    group = parser.add_argument_group("a step of yours that no table names", about)
    for key in ("reference", *_OPTIONAL):
        add(group, _OPTIONS[key], "PLACE", _KEYS[key], rare=key in ("optimizer", "contract"))
    if not shape:
        add(group, "--microbatches", "PLACE", _KEYS["microbatches"], count_or_place)
        add(group, "--ranks", "P", _KEYS["ranks"], whole)


def _known() -> Sequence[str]:
    return [*steps_of(Path.cwd())]


def count_or_place(word: str) -> int | str:
    """``8``, or what makes the microbatches of a user's own step: ``module:name``."""
    return word if ":" in word else whole(word)


def is_step(words: Sequence[str]) -> bool:
    """Whether these words name a user's own step, with what a campaign drew for it, and not a case."""
    drawn = all("=" in word for word in words[1:])
    return bool(words) and drawn and (":" in words[0] or words[0] in _known())


def step_of(options: argparse.Namespace, name: str | None) -> OwnStep | None:
    """The step that is asked for; None for built-in schedules. Raises ``StepError`` or ``UsageError``."""
    said = {key: getattr(options, key) for key, option in _OPTIONS.items() if option in options.given}
    if name is None:
        for key in (key for key, value in said.items() if isinstance(value, str)):
            raise UsageError(
                f"{_OPTIONS[key]} is of a step of yours, and none is named: expected STEP before it, as "
                f"{options.prog} my_pipeline.py:my_step"
            )
        return None
    line = " ".join(f"{_OPTIONS[key]} {value}" for key, value in said.items())
    if name in (known := steps_of(Path.cwd())):
        return replace(known[name], given={**known[name].given, **said}, options=line)
    if not is_place(name):
        raise _unknown(name, known, f"{FILE} names none, and {name!r} is no {EXPECTED}")
    return OwnStep(name.partition(":")[2], options.prog, Path.cwd(), name, {"step": name, **said}, line)


def steps_named(names: Sequence[str]) -> tuple[OwnStep, ...]:
    """Those of the table, or all of it where none is named. Raises ``StepError`` for one that it does not have."""
    known = steps_of(Path.cwd())
    for name in (name for name in names if name not in known):
        raise _unknown(name, known, f"{FILE} has no table [tool.pipeproof.steps.{name}]")
    return tuple(known[name] for name in names or known)


def _unknown(name: str, known: Mapping[str, OwnStep], none: str) -> StepError:
    return StepError(f"unknown step {name!r}: {list_known(name, [*known]) if known else none}")
