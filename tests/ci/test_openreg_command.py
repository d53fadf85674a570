"""ci/openreg: what it says where openreg is missing. What it runs is in tests/quality/test_on_openreg.py."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.sources import ROOT


@pytest.mark.skipif(find_spec("torch_openreg") is not None, reason="it is installed here")
@pytest.mark.parametrize("python", [sys.executable, "no/such/python"])
def test_a_python_without_it_is_refused_in_a_sentence(python: str) -> None:
    environment = {**os.environ, "OPENREG": python}
    ran = subprocess.run([ROOT / "ci" / "openreg"], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"ci/openreg: {python} cannot import torch_openreg: install it from pytorch's sources")
    assert ran.stdout == ""
