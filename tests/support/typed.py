"""Command lines as a user types them: what they say, and their exit statuses."""

import shlex
from collections.abc import Sequence

import pytest

from tests.support.golden import golden


class Typed:
    """Runs lines in this process. What one says is compared with the golden text, or those ``lines`` of it are."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(
        self, line: str | Sequence[str], status: int = 0, *, lines: str | None = None, numbers: bool = True
    ) -> str:
        """What ``line`` says on standard output; it ends with ``status``."""
        out = self.only(line, status)[0]
        golden(out, lines=lines, numbers=numbers)
        return out

    def refused(self, line: str | Sequence[str], words: str = "") -> None:
        """It says one sentence, with these ``words`` or else the golden one; exit status 2, no standard output."""
        out, err = self.only(line, 2)
        assert out == ""
        assert "Traceback" not in err
        assert words in err
        if not words:
            golden(err)

    def said(self) -> str:
        """What was said on standard output since the last call."""
        return self._capsys.readouterr().out

    def only(self, line: str | Sequence[str], status: int = 0) -> tuple[str, str]:
        """Standard output and standard error of ``line``, which ends with ``status``."""
        from pipeproof.commands.cli import main

        self.said()
        try:
            ended = main(shlex.split(line) if isinstance(line, str) else line)
        except SystemExit as error:  # argparse's own
            ended = int(error.code or 0)
        out, err = self._capsys.readouterr()
        assert ended == status, f"{ended}: {out}{err}"
        return out, err
