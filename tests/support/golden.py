"""Texts that users read, kept in ``tests/golden``: a test compares a whole text, and one command mends all of them.

``GOLDEN=rewrite pytest PATH`` writes what the tests make; without it a text that differs, or that is not there, fails.
A file has the texts of one module, each under a line with its test's name and, from the second on, its number there.
"""

import difflib
import os
import platform
import re
import socket
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.sources import ROOT

GOLDEN = Path("golden")  # in tests
HEAD = "==== "
Texts = dict[str, str]  # by the lines above them

_ALONE = not {"PYTEST_XDIST_WORKER", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
COLLECTED = pytest.StashKey[list[pytest.Item]]()  # before any is deselected


class Golden:
    """Compares the texts of one test with those of its module's file, or keeps them there."""

    def __init__(self, file: Path, test: str, *, rewrite: bool, folders: Iterable[Path] = ()) -> None:
        self._file, self._test, self._rewrite = file, test, rewrite
        self._folders = tuple(folders)
        self.made: Texts = {}

    def compare(self, text: str, *, lines: str | None = None, exact: bool = False, numbers: bool = True) -> None:
        """Compare ``text``, or what it has that matches ``lines``, with the entry of this call.

        What the machine puts into it is masked: its folders, versions, ports and addresses; but where ``exact``,
        lines of files and times in seconds too, and without ``numbers`` all that have a point or an exponent.

        Raises:
            AssertionError: It differs, with a diff; or there is no such entry.
        """
        __tracebackhide__ = True
        made = masked(text, self._folders, exact=exact, numbers=numbers)
        if lines is not None:
            made = "\n".join(line for line in made.splitlines() if re.search(lines, line))
            assert made, f"no line matches {lines!r} in:\n{text}"
        made = made.strip("\n")
        assert not any(line.startswith(HEAD) for line in made.splitlines()), "a line of it looks like a head"
        name = f"{self._test} {len(self.made) + 1}" if self.made else self._test
        self.made[name] = made
        if self._rewrite:
            return
        kept = read(self._file).get(name)
        rewrite = "`GOLDEN=rewrite pytest` writes it"
        assert kept is not None, f"{self._file.name} has no text of {name}; {rewrite}:\n{made}"
        if made != kept:
            diff = difflib.unified_diff(kept.splitlines(), made.splitlines(), "kept", "made", lineterm="")
            raise AssertionError("\n".join([f"{name} has another text; {rewrite}", *diff]))

    def keep(self, names: Collection[str] | None) -> None:
        """Write this test's texts in place of its old ones, and drop those of tests that are not among ``names``."""
        kept = read(self._file)
        others = {name: text for name, text in kept.items() if owner(name) != self._test}
        if names is not None:
            others = {name: text for name, text in others.items() if owner(name) in names}
        if (texts := others | self.made) != kept:
            write(self._file, texts)


def masked(text: str, folders: Iterable[Path] = (), *, exact: bool = False, numbers: bool = True) -> str:
    """``text`` as it is on every machine and at every time."""
    for folder in folders:
        text = text.replace(str(folder), "TMP")
    within = re.escape(tempfile.gettempdir())
    text = re.sub(rf"{within}/pytest-of-\w+/pytest-\d+/(popen-gw\d+/)?[\w.-]+", "TMP", text)
    text = re.sub(rf"{within}/tmp\w{{8}}", "TMP", text)
    text = re.sub(r"/\S*/site-packages/", "SITE/", text)
    for known, name in ((sys.prefix, "PYTHON"), (str(ROOT), "ROOT"), (socket.gethostname(), "HOST"), *_versions()):
        text = re.sub(rf"(?<![\w.]){re.escape(known)}(?!\w)", name, text)
    text = re.sub(r"\b(127\.0\.0\.1|localhost):\d+", r"\1:PORT", text)
    text = re.sub(r"\b0x[0-9a-f]{6,}\b", "0xADDRESS", text)
    text = re.sub(r'(", line )\d+(, in )', r"\1#\2", text)  # of a traceback
    if not exact:
        text = re.sub(r"(\w\.py:)\d+\b", r"\1#", text)
        text = re.sub(r"\b\d[\d.,]*( ?)(ms|s|seconds?|cases/s)\b(?!=)", r"#\1\2", text)
    if not numbers:
        text = re.sub(r"\b\d+(\.\d+)?e[+-]?\d+|\b\d+\.\d+\b", "#", text)
    return text


def _versions() -> Iterator[tuple[str, str]]:
    yield platform.python_version(), "VERSION"
    if torch := sys.modules.get("torch"):
        yield str(torch.__version__), "VERSION"
        yield str(torch.__version__).partition("+")[0], "VERSION"  # as packages say it


def read(file: Path) -> Texts:
    """All texts of a file; none where it is not there."""
    if not file.exists():
        return {}
    parts = re.split(rf"^{HEAD}(.*)\n", file.read_text(), flags=re.MULTILINE)[1:]
    return {name: text.strip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def write(file: Path, texts: Texts) -> None:
    """Replace a file, sorted by test and number; one without texts is removed."""
    if not texts:
        return file.unlink(missing_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(f"{HEAD}{name}\n{texts[name]}\n" for name in sorted(texts, key=_order)))


def owner(name: str) -> str:
    """The test of an entry."""
    return re.sub(r" \d+$", "", name)


def _order(name: str) -> tuple[str, int]:
    return owner(name), int(name.removeprefix(owner(name)) or 1)


def file_of(module: Path, tests: Path) -> Path:
    """Where the texts of a test module lie."""
    return tests / GOLDEN / module.relative_to(tests).with_suffix(".txt")


def name_of(item: pytest.Item) -> str:
    """A test's name in its module."""
    return item.nodeid.split("::", 1)[1].replace("\n", " ")


def whole(config: pytest.Config, module: Path) -> set[str] | None:
    """The names of all tests of a module, as far as all of them were collected."""
    if any("::" in argument for argument in config.args):
        return None
    return {name_of(item) for item in config.stash[COLLECTED] if item.path == module}


def stale(config: pytest.Config, tests: Path) -> list[str]:
    """Entries whose tests are no more, of modules that were collected."""
    modules = {item.path for item in config.stash[COLLECTED]}
    names = {file_of(module, tests): whole(config, module) for module in modules}
    return [
        f"{file.relative_to(tests)}: {name}"
        for file, known in names.items()
        for name in read(file)
        if known is not None and owner(name) not in known
    ]


_now: list[Golden] = []  # of the test that runs


@contextmanager
def texts_of(item: pytest.Item) -> Iterator[None]:
    """Let ``golden`` compare the texts of ``item`` while it runs, or keep them."""
    rewrite = os.environ.get("GOLDEN") == "rewrite"
    assert _ALONE or not rewrite, "processes would overwrite one another's texts: rewrite them with one"
    before = {owner(name) for name in read(file_of(item.path, ROOT / "tests"))} if rewrite else set()
    folders = [path] if (path := getattr(item, "funcargs", {}).get("tmp_path")) else []
    texts = Golden(file_of(item.path, ROOT / "tests"), name_of(item), rewrite=rewrite, folders=folders)
    _now[:] = [texts]
    try:
        yield
    finally:
        _now.clear()
    if rewrite and (texts.made or name_of(item) in before):
        texts.keep(whole(item.config, item.path))


def golden(text: str, *, lines: str | None = None, exact: bool = False, numbers: bool = True) -> None:
    """Compare ``text`` with what is kept of this test: see :meth:`Golden.compare`."""
    __tracebackhide__ = True
    (texts,) = _now
    texts.compare(text, lines=lines, exact=exact, numbers=numbers)
