"""A step of the user's own: where it and its reference are, by ``[tool.pipeproof.steps]`` or the command line.

``OwnStep`` is text and numbers, and is checked before anything of the user's is imported. ``load`` imports it.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pipeproof.commands.option_parser import UsageError, add, whole
from pipeproof.commands.team_defaults import FILE, find_file, read_table
from pipeproof.pipeline.schedules import list_known
from pipeproof.pipeline.sizes import MOST_PROCESSES, is_number
from pipeproof.whitebox.places import EXPECTED, call, find_place, is_place

_NEEDED = {
    "step": "the function that every rank calls",
    "reference": "what builds the whole model on one device",
    "microbatches": "what makes the data, or a list of it",
    "ranks": "how many ranks the step takes",
}
_OPTIONAL = {
    "loss_fn": "the loss of an output and a target",
    "optimizer": "what makes the reference's optimizer of the model",
    "contract": "a pipeproof.Contract: what the step claims",
}
_FUNCTIONS = dict.fromkeys(("step", "loss_fn", "optimizer"), "a function")
_FUNCTIONS["reference"] = "a function that builds the model, or a StageByStage"
_MADE = {"microbatches": "a list, or a function that makes one", "contract": "a pipeproof.Contract"}
_RANKS = f"from 1 to {MOST_PROCESSES}, a list with the replica of each rank, or a mesh as {{pp = 2, dp = 2}}"


class StepError(ValueError):
    """A step of the user's that is not described, or not there."""


@dataclass(frozen=True)
class OwnStep:
    """What ``whitebox.validate`` is given, each as the place where it is: ``module:name``, or ``file.py:name``.

    ``origin`` begins each sentence about it; ``folder`` is where places are looked for; ``line`` is what to type for
    it; ``fuzz`` is what ``whitebox.fuzz`` is given besides. Raises ``StepError`` for what cannot be.
    """

    name: str
    origin: str
    folder: Path
    line: str
    step: str = ""
    reference: str = ""
    microbatches: str = ""
    ranks: int | tuple[int, ...] | Mapping[str, int] = 0
    loss_fn: str = ""
    optimizer: str = ""
    contract: str = ""
    timeout: float | None = None
    fuzz: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, what in (_NEEDED | _OPTIONAL).items():
            value = getattr(self, key)
            if key in _NEEDED and value in ("", 0):
                raise StepError(f"{self.origin} has no {key}, {what}: add {key} = {_example(key)}")
            if key != "ranks" and value != "" and not is_place(value):
                raise StepError(f"{self.origin} {key} = {value!r}: expected {EXPECTED}, as {_example(key)}")
        object.__setattr__(self, "ranks", _check_ranks(self.ranks, self.origin))
        if self.timeout is not None and not is_number(self.timeout, zero=False):
            raise StepError(f"{self.origin} timeout = {self.timeout!r}: expected seconds above 0, as 60")
        if not isinstance(self.fuzz, Mapping):
            raise StepError(f"{self.origin} fuzz = {self.fuzz!r}: expected a table, as {{microbatches = [1, 2, 4]}}")

    @property
    def processes(self) -> int:
        """How many ranks it takes."""
        if isinstance(self.ranks, Mapping):
            count = 1
            for size in self.ranks.values():
                count *= size
            return count
        return self.ranks if isinstance(self.ranks, int) else len(self.ranks)

    def load(self) -> dict[str, Any]:
        """The arguments of ``whitebox.validate``, ``step`` among them. Raises ``ValueError`` for what is not there."""
        from pipeproof.core.contract import Contract  # torch comes with it
        from pipeproof.whitebox.expectation import Expectation

        found: dict[str, Any] = {key: self._find(key) for key in (*_NEEDED, *_OPTIONAL) if key != "ranks"}
        for key in ("microbatches", "contract"):
            found[key] = call(found[key], self._said(key))
        for key, value in found.items():
            own = {"microbatches": Sequence, "contract": Contract, "reference": Expectation}.get(key)
            fits = isinstance(value, own) if own is not None else False
            if value is not None and not (fits or (callable(value) and key in _FUNCTIONS)):
                raise StepError(f"{self._said(key)} is {_short(value)}: expected {_FUNCTIONS.get(key) or _MADE[key]}")
        given = {key: value for key, value in found.items() if value is not None}
        return given | {"ranks": self.ranks} | ({} if self.timeout is None else {"timeout_s": self.timeout})

    def load_fuzz(self) -> dict[str, Any]:
        """What ``whitebox.fuzz`` is given besides: the table ``fuzz``, in which a place stands for what is there."""
        return {
            key: find_place(value, self.folder, f"{self.origin} fuzz.{key} = {value!r}") if is_place(value) else value
            for key, value in self.fuzz.items()
        }

    def _said(self, key: str) -> str:
        return f"{self.origin} {key} = {getattr(self, key)!r}"

    def _find(self, key: str) -> Any:
        place = getattr(self, key)
        return find_place(place, self.folder, self._said(key)) if place else None


_KEYS = [one.name for one in fields(OwnStep) if one.name not in ("name", "origin", "folder", "line")]


def _example(key: str) -> str:
    return "2" if key == "ranks" else f'"tests.my_pipeline:{"build_model" if key == "reference" else f"my_{key}"}"'


def _check_ranks(ranks: Any, origin: str) -> int | tuple[int, ...] | Mapping[str, int]:
    parts = ranks.values() if isinstance(ranks, Mapping) else ranks if isinstance(ranks, list | tuple) else [ranks]
    least = 0 if isinstance(ranks, list | tuple) else 1
    if not parts or any(type(one) is not int or not least <= one <= MOST_PROCESSES for one in parts):
        raise StepError(f"{origin} ranks = {ranks!r}: expected a number {_RANKS}")
    return tuple(ranks) if isinstance(ranks, list) else ranks


def _short(value: object) -> str:
    said = repr(value)
    return f"{said if len(said) < 40 else type(value).__name__}"


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
        if unknown := next((key for key in entry if key not in _KEYS), None):
            raise StepError(f"{origin} has {unknown!r}, which is no key of a step: {list_known(unknown, _KEYS)}")
        found[name] = OwnStep(name, origin, path.parent, name, **entry)
    return found


def add_step(parser: argparse.ArgumentParser, *, positional: bool = True, shape: bool = False) -> None:
    """A step of the user's, in place of built-in schedules; ``shape``: ranks and microbatches are options already."""
    if positional:
        named = "a step of yours: its name in [tool.pipeproof.steps] of pyproject.toml, or file.py:function"
        add(parser, "step", "STEP", f"{named}; without one, the built-in schedules", nargs="?", known=_known)
    about = "each PLACE is module:name, or file.py:name"
    group = parser.add_argument_group("a step of yours that no table names", about)
    for key in ("reference", *_OPTIONAL):
        what = (_NEEDED | _OPTIONAL)[key]
        add(group, f"--{key.replace('_', '-')}", "PLACE", what, rare=key in ("optimizer", "contract"))
    if not shape:
        add(group, "--microbatches", "PLACE", _NEEDED["microbatches"], count_or_place)
        add(group, "--ranks", "P", _NEEDED["ranks"], whole)


def _known() -> Sequence[str]:
    return [*steps_of(Path.cwd())]


def count_or_place(word: str) -> int | str:
    """``8``, or what makes the microbatches of a user's own step: ``module:name``."""
    return word if ":" in word else whole(word)


def is_step(words: Sequence[str]) -> bool:
    """Whether these words name a user's own step, and not a case."""
    return len(words) == 1 and (":" in words[0] or words[0] in _known())


def step_of(options: argparse.Namespace, name: str | None) -> OwnStep | None:
    """The step that is asked for; None for built-in schedules. Raises ``StepError`` or ``UsageError``."""
    keys = {key: f"--{key.replace('_', '-')}" for key in ("reference", "microbatches", "ranks", *_OPTIONAL)}
    said = {key: getattr(options, key) for key, option in keys.items() if option in options.given}
    if name is None:
        own = [key for key, value in said.items() if isinstance(value, str)]
        for key in own:
            raise UsageError(
                f"{keys[key]} is of a step of yours, and none is named: expected STEP before it, as "
                f"{options.prog} my_pipeline.py:my_step"
            )
        return None
    known = steps_of(Path.cwd())
    if name in known:
        return replace(known[name], **said) if said else known[name]
    if not is_place(name):
        hint = list_known(name, [*known]) if known else f"{FILE} names none, and {name!r} is no {EXPECTED}"
        raise StepError(f"unknown step {name!r}: {hint}")
    line = " ".join([name, *(f"{keys[key]} {value}" for key, value in said.items())])
    return OwnStep(name.partition(":")[2], options.prog, Path.cwd(), line, step=name, **said)


def steps_named(names: Sequence[str]) -> tuple[OwnStep, ...]:
    """Those of the table, or all of it where none is named. Raises ``StepError`` for one that it does not have."""
    known = steps_of(Path.cwd())
    for name in names:
        if name not in known:
            hint = list_known(name, [*known]) if known else f"{FILE} has no table [tool.pipeproof.steps.{name}]"
            raise StepError(f"unknown step {name!r}: {hint}")
    return tuple(known[name] for name in names or known)
