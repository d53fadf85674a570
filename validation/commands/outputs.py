"""Where a command's results go besides the terminal: options that commands share, and the document that they write.

A new form of output (a page, say) is a line of ``add_outputs``, a field of ``Outputs`` and a line of ``Opened.finish``.
``validation/reports/schema.json`` says what the document is.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias

from pipeproof.commands.ending import Asked
from pipeproof.commands.option_parser import add
from pipeproof.core.verdict import SCHEMA, Verdict
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


@dataclass(frozen=True)
class Outputs:
    """The files that are wanted."""

    json: str | None = None
    record: str | None = None
    html: str | None = None
    write: str | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Outputs":
        """What the command line asks for."""
        return cls(**{one.name: getattr(options, one.name, None) for one in fields(cls)})

    @contextmanager
    def open(self, command: str) -> Iterator["Opened"]:
        """The files, opened before the work: a path that cannot be written costs nothing."""
        with ExitStack() as stack:
            files = {name: stack.enter_context(OutputFile(path)) for name, path in asdict(self).items()}
            yield Opened(command, files)


@dataclass(frozen=True)
class Opened:
    """Files by name that are open until the command ends; each is written once, and whole."""

    command: str
    files: Mapping[str, OutputFile]
    asked: Asked = field(default_factory=Asked, init=False)

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
