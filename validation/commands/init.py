"""``init``: a test file for a user's own code, which runs as it is, or a workflow for GitHub. It never overwrites."""

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
GITHUB, _WORKFLOW = "github", ".github/workflows/pipeline.yml"
KINDS = (*STARTERS, GITHUB)


def add_init_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command."""
    about = "write a test of your own pipeline, which runs as it is, with three places to change; or a CI workflow"
    parser = commands.add_parser("init", help=about)
    kinds = f"one of {', '.join(KINDS)}; --list says what each is for"
    add(parser, "kind", None, kinds, known=KINDS, nargs="?", default=STARTERS[0])
    names = f"the file to write, or - for standard output (default {_NAME}, or {_WORKFLOW})"
    add(parser, "file", "FILE", names, nargs="?")
    add_flag(parser, "--list", says="say what each is for, and write nothing")
    parser.set_defaults(run=_init)


def _init(options: argparse.Namespace) -> int:
    terminal = Terminal()
    if options.list:
        width = max(map(len, KINDS))
        for kind in KINDS:
            terminal.say(f"{kind:<{width}}  {describe(kind)[0]}")
        return 0
    kind, file = options.kind, options.file or (_WORKFLOW if options.kind == GITHUB else _NAME)
    if options.file is None and (kind == "-" or kind.endswith(".py")):
        kind, file = STARTERS[0], kind
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}: {list_known(kind, KINDS)}; pipeproof init --list says what for")
    if file == "-":
        terminal.say(text(kind).rstrip("\n"))
        return 0
    write_new(file, text(kind), is_test=kind != GITHUB)
    about, need = describe(kind)
    terminal.say(f"{file}: {about}")
    if need:
        terminal.detail(need)
    if kind == GITHUB:
        terminal.detail("Name your steps in pyproject.toml, [tool.pipeproof.steps]; try it:  pipeproof gate")
        return 0
    terminal.detail(f"It runs as it is:  pytest {shlex.quote(file)}")
    terminal.detail("Then change the three places that are marked CHANGE: model, data, step.")
    return 0


def text(kind: str) -> str:
    """The file of this kind."""
    name = f"{kind}.yml" if kind == GITHUB else f"{kind}.py"
    return files("pipeproof.commands").joinpath("starters", name).read_text(encoding="utf-8")


def describe(kind: str) -> tuple[str, str]:
    """What the file of this kind is for, as it begins; and what has to be installed for it, empty where nothing has."""
    if kind == GITHUB:
        return "A workflow for GitHub Actions: your tests, then your steps, on every push; random cases at night.", ""
    said = ast.get_docstring(ast.parse(text(kind)))
    assert said, f"{kind} says what it is for"
    parts = [" ".join(part.split()) for part in said.split("\n\n")]
    return parts[0], next((part for part in parts if part.startswith("It needs ")), "")


def write_new(file: str, content: str, *, is_test: bool = True) -> None:
    """Write ``content`` to a new file, that pytest or GitHub finds by its name. Raises ``OutputError``."""
    path = Path(file)
    if is_test and not (path.name.startswith("test_") and path.suffix == ".py"):
        raise OutputError(f"{file}: expected a name such as {_NAME}, for pytest collects test_*.py")
    if not is_test and path.suffix not in (".yml", ".yaml"):
        raise OutputError(f"{file}: expected a name such as {_WORKFLOW}, where GitHub looks for workflows")
    try:
        if file == _WORKFLOW:  # which GitHub wants there
            path.parent.mkdir(parents=True, exist_ok=True)
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
