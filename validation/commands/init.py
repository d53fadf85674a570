"""``init``: a test file for a user's own code, which runs as it is. It never overwrites."""

import argparse
import ast
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

from pipeproof.commands.option_parser import add, add_flag
from pipeproof.pipeline.schedules import list_known
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.output_file import OutputError

STARTERS = ("custom", "torch", "own", "megatron", "deepspeed", "torchtitan", "nanotron", "colossalai", "transformers")
_NAME = "test_my_pipeline.py"


def add_init_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command."""
    about = "write a test file for your own pipeline, which runs as it is, with three places to change"
    parser = commands.add_parser("init", help=about)
    kinds = f"one of {', '.join(STARTERS)}; --list says what each is for"
    add(parser, "kind", None, kinds, known=STARTERS, nargs="?", default=STARTERS[0])
    add(parser, "file", "FILE", f"the file to write, or - for standard output (default {_NAME})", nargs="?")
    add_flag(parser, "--list", says="say what each is for, and write nothing")
    parser.set_defaults(run=_init)


def _init(options: argparse.Namespace) -> int:
    terminal = Terminal()
    if options.list:
        width = max(map(len, STARTERS))
        for kind in STARTERS:
            terminal.say(f"{kind:<{width}}  {summary(kind)}")
        return 0
    kind, file = options.kind, options.file or _NAME
    if options.file is None and (kind == "-" or kind.endswith(".py")):
        kind, file = STARTERS[0], kind
    if kind not in STARTERS:
        raise ValueError(f"unknown kind {kind!r}: {list_known(kind, STARTERS)}; pipeproof init --list says what for")
    if file == "-":
        terminal.say(text(kind).rstrip("\n"))
        return 0
    write_new(file, text(kind))
    terminal.say(f"{file}: {summary(kind)}")
    if need := requirements(kind):
        terminal.detail(need)
    terminal.detail(f"It runs as it is:  pytest {shlex.quote(file)}")
    terminal.detail("Then change the three places that are marked CHANGE: model, data, step.")
    return 0


def text(kind: str) -> str:
    """The file of this kind."""
    return files("pipeproof.commands").joinpath("starters", f"{kind}.py").read_text(encoding="utf-8")


def summary(kind: str) -> str:
    """What the file of this kind is for: how it begins."""
    return _list_kind(kind)[0]


def requirements(kind: str) -> str:
    """What has to be installed for it; empty where nothing has to be."""
    return next((part for part in _list_kind(kind) if part.startswith("It needs ")), "")


def _list_kind(kind: str) -> list[str]:
    said = ast.get_docstring(ast.parse(text(kind)))
    assert said, f"{kind} says what it is for"
    return [" ".join(part.split()) for part in said.split("\n\n")]


def write_new(file: str, content: str) -> None:
    """Write ``content`` to a file that pytest collects and that is not there yet. Raises ``OutputError``."""
    path = Path(file)
    if not (path.name.startswith("test_") and path.suffix == ".py"):
        raise OutputError(f"{file}: expected a name such as {_NAME}, for pytest collects test_*.py")
    try:
        opened = path.open("x", encoding="utf-8")
    except FileExistsError:
        raise OutputError(f"{file} is there already, and init overwrites nothing: give another FILE") from None
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror}; choose a writable folder that is there") from None
    try:
        with opened:
            opened.write(content)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OutputError(f"cannot write {file}: {error.strerror}; make room there, or choose another") from None
