"""What ``pipeproof init`` writes passes as it is, and is red where the step is wrong."""

from collections.abc import Callable
from pathlib import Path

from pipeproof.commands.init import STARTERS, needed, text, write_new
from tests.support.warm_start import Ended

ALONE = [kind for kind in STARTERS if not needed(kind)]  # those of frameworks run by ci/frameworks
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
    assert "cause     scale" in done.stdout
