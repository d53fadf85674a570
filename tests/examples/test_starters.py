"""What ``pipeproof init`` writes passes as it is, and is red where the step is wrong."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeproof.commands.init import STARTERS, describe, text, write_new
from pipeproof.core.cause import KINDS
from tests.support.guides import PAGES
from tests.support.warm_start import Ended

ALONE = [kind for kind in STARTERS if not describe(kind)[1]]  # those of frameworks run by ci/frameworks
FRAMEWORKS = [kind for kind in STARTERS if describe(kind)[1]]
Launch = Callable[..., Ended]


def test_every_new_file_passes_as_it_is_and_finds_what_is_wrong(python: Launch, tmp_path: Path) -> None:
    for kind in ALONE:
        write_new(str(tmp_path / f"test_{kind}.py"), text(kind))
    right = "y = loss / len(microbatches)"
    assert right in text("custom")
    write_new(str(tmp_path / "test_wrong.py"), text("custom").replace(right, "y = loss"))
    done = python(tmp_path, "-m", "pytest", "-rA", "-p", "no:cacheprovider")
    assert done.returncode == 1, done.stdout
    assert "3 passed" in done.stdout
    assert "1 failed" in done.stdout
    for kind in ALONE:
        assert f"PASSED test_{kind}.py::test_my_pipeline" in done.stdout
    assert f"FAIL everywhere: {KINDS['scale']}" in done.stdout


@pytest.mark.sweep
def test_a_framework_that_is_missing_is_one_sentence_with_the_line_that_installs_it(
    python: Launch, tmp_path: Path
) -> None:
    for kind in FRAMEWORKS:
        write_new(str(tmp_path / f"test_{kind}.py"), text(kind))
    (tmp_path / "conftest.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({FRAMEWORKS}))\n")
    done = python(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors")
    assert f"{len(FRAMEWORKS)} errors" in done.stdout, done.stdout
    assert "ModuleNotFoundError" not in done.stdout
    for kind in FRAMEWORKS:
        install = describe(kind)[1].removeprefix(f"It needs {kind}: ")
        assert re.search(rf"Error: {kind}[-\w]* is not installed: {re.escape(install)}\n", done.stdout), kind


@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_a_guide_installs_what_the_file_needs(kind: str) -> None:
    lines = re.findall(r"(?m)^\$ (pip install .*)$", PAGES[f"validation/guides/{kind}.md"])
    assert describe(kind)[1] == f"It needs {kind}: {' && '.join(lines)}"
