"""Where a command's results go besides the terminal: options that commands share, and the document that they write.

A new form of output (a page, say) is a line of ``add_outputs``, a name in ``_FILES`` and a line of ``Outputs.finish``.
``validation/reports/schema.json`` says what the document is.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from pipeproof.commands.ending import Asked
from pipeproof.commands.option_parser import add
from pipeproof.core.verdict import SCHEMA, Verdict
from pipeproof.reports.drawings import ENDINGS
from pipeproof.reports.terminal import Terminal
from pipeproof.worlds.output_file import OutputError, OutputFile

Group: TypeAlias = Mapping[str, object]


class OutPath(str):
    """The name of a file to write, as an option has it; ``-`` is standard output."""


def add_file(parser: argparse.ArgumentParser, option: str, says: str, **more: Any) -> None:
    """An option that names a file to write; ``more`` is as ``add`` has it."""
    add(parser, option, "FILE", says, OutPath, **more)


def add_outputs(
    parser: argparse.ArgumentParser, *, what: str = "verdicts", page: bool = False, record: bool = False
) -> None:
    """The files that a command writes besides what it prints; ``page``: it has a page to show, ``record``: a record."""
    if record:
        add_file(parser, "--record", "write what the ranks gave there, for compare", rare=True)
    add_file(parser, "--json", f"write {what} there; - is standard output")
    if page:
        add_file(parser, "--html", f"write {what} there as a page for a browser")


def takes_standard_output(options: argparse.Namespace) -> bool:
    """Whether a file is to be standard output.

    Raises ``OutputError`` where two are one, for the last would be left, and where one cannot be written: here, before
    torch is imported, that is said at once.
    """
    wanted = {f"--{name}": value for name, value in vars(options).items() if isinstance(value, OutPath)}
    taken: dict[str, str] = {}
    for option, path in wanted.items():
        place = path if path == "-" else os.path.realpath(path)
        if os.path.exists(place) and not os.path.isfile(place):
            continue  # a device takes all
        if place in taken:
            why = "standard output takes one file" if path == "-" else "give each its own file"
            raise OutputError(f"{taken[place]} and {option} are both {path}: {why}")
        taken[place] = option
    for path in () if getattr(options, "artifacts", None) else wanted.values():  # which may be the folder of others
        with OutputFile(path):
            pass
    return "-" in taken


_FILES = ("json", "record", "html", "write", "junit", "summary", *ENDINGS)  # options


@dataclass(frozen=True)
class Outputs:
    """Files by option that are open until the command ends; each is written once, and whole."""

    command: str = ""
    paths: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, OutputFile] = field(default_factory=lambda: {name: OutputFile(None) for name in _FILES})
    asked: Asked = field(default_factory=Asked, init=False)

    @classmethod
    @contextmanager
    def open(cls, command: str, paths: Mapping[str, str | None]) -> Iterator["Outputs"]:
        """The files at ``paths``, opened before the work: a path that cannot be written costs nothing.

        Some may be in the folder of ``artifacts``, which is made first, and goes where the command is refused.
        """
        folder = paths.get("artifacts")
        with ExitStack() as stack:
            if folder is not None and not os.path.isdir(folder):
                try:
                    os.makedirs(folder, exist_ok=True)
                except OSError as error:
                    why = f"{error.strerror or error}; choose a new name in a writable folder"
                    raise OutputError(f"cannot make the folder {folder}: {why}") from error
                stack.push(partial(_take_back, folder))
            files = {name: stack.enter_context(OutputFile(paths.get(name))) for name in _FILES}
            yield cls(command, paths, files)

    def finish(
        self,
        status: int,
        verdicts: Sequence[Verdict] = (),
        *,
        groups: Sequence[Group] = (),
        page: Callable[[], str] | None = None,
        **more: object,
    ) -> int:
        """Write what was found, and ``page`` if it is wanted; returns the exit status. The rest is as for ``document``.

        Where the work was to be ended, what was found before is written, and the request raised again.
        """
        request, html = self.asked.request, self.files["html"]
        if request is not None:
            status, more = request.status, more | {"interrupted": True}
        self.files["json"].write_json(document(self.command, status, verdicts, groups=groups, **more))
        if page is not None and html.wanted:
            html.write(page().encode(errors="backslashreplace"))  # a file's name may be no text
            if html.name:
                Terminal().detail(f"{html.name}: a page, to look at in a browser")
        if request is not None:
            raise request
        return status


def _take_back(folder: str, kind: type[BaseException] | None, *_: object) -> None:
    """Remove ``folder`` where the command was refused, unless something is in it."""
    if kind is not None and issubclass(kind, ValueError):
        with suppress(OSError):
            os.rmdir(folder)


def document(
    command: str, status: int, verdicts: Sequence[Verdict] = (), *, groups: Sequence[Group] = (), **more: object
) -> dict[str, object]:
    """What every command writes as JSON.

    ``groups`` say more of the verdicts, one of each; ``more`` is what this command has besides verdicts.
    """
    data = [verdict.as_dict() for verdict in verdicts]
    for verdict, group in zip(data, groups, strict=False):
        verdict |= group
    return {"schema": SCHEMA, "command": command, "status": int(status), "verdicts": data, **more}
