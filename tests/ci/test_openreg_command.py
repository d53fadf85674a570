"""ci/openreg: what it says where openreg is missing. What it runs is in tests/quality/test_on_openreg.py."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.golden import golden
from tests.support.sources import ROOT


@pytest.mark.sweep
@pytest.mark.skipif(find_spec("torch_openreg") is not None, reason="it is installed here")
@pytest.mark.parametrize("python", [sys.executable, "no/such/python"], ids=["without", "none"])
def test_a_python_without_it_is_refused_in_a_sentence(python: str) -> None:
    environment = {**os.environ, "OPENREG": python}
    ran = subprocess.run([ROOT / "ci" / "openreg"], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    golden(ran.stderr)
    assert ran.stdout == ""


def test_a_folder_that_is_no_checkout_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    script = tmp_path / "ci" / "openreg"  # a copy, as it makes an environment beside itself
    script.parent.mkdir()
    shutil.copy(ROOT / "ci" / "openreg", script)
    environment = {**os.environ, "PYTORCH": str(tmp_path)}
    environment.pop("OPENREG", None)
    ran = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    golden(ran.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["ci"]
