"""What a user gets: a wheel, installed where nothing of this clone is, beside projects with folders named like ours."""

import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pipeproof.worlds.launcher import launch_environment
from tests.support.sources import OURS, ROOT
from tests.support.warm_start import Ended, run_new

pytestmark = pytest.mark.pipeproof_ranks  # it starts processes
_BOUND_S = 240


@dataclass(frozen=True)
class Installed:
    """A Python that has the wheel, and what we depend on."""

    python: Path

    def run(self, folder: Path, *arguments: str) -> Ended:
        """``python ARGUMENTS`` in ``folder``; all output as one text."""
        own = {name: text for name, text in launch_environment().items() if not name.startswith(("PYTEST_", "PYTHON"))}
        return run_new(self.python, folder, arguments, own, bound_s=_BOUND_S)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build the wheel, and install it by name from a folder of wheels, as from an index."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", f"--wheel-dir={folder}/wheels", ROOT], check=True, timeout=_BOUND_S)
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    install = ["install", "--no-deps", "--no-index", f"--find-links={folder}/wheels", "pipeproof"]
    subprocess.run([*pip, "--python", python, *install], check=True, timeout=_BOUND_S)
    # What we depend on is found behind the wheel. A path file in there is not read, so this clone stays out of sight.
    (site,) = (folder / "venv").glob("lib/python3*/site-packages")
    others = dict.fromkeys(str(Path(module.__file__ or "").parents[1]) for module in (torch, pytest))
    (site / "others.pth").write_text("\n".join(others))
    return Installed(python)


STEP = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

def data():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)) for _ in range(4)]

def step(model, microbatches, wrong=1):
    losses = []
    for x, y in microbatches:
        loss = nn.functional.mse_loss(model(x), y)
        (wrong * loss / len(microbatches)).backward()
        losses.append(loss.item())
    return model, losses
"""
JUDGED = """
from functools import partial
import pipeproof
from {own} import build, data, step
import pytest, torch

def judge(whitebox, step):
    loss_fn = torch.nn.functional.mse_loss
    return whitebox.validate(step, reference=build, microbatches=data(), ranks=1, loss_fn=loss_fn)

def test_my_step(whitebox):
    judge(whitebox, step).raise_if_failed()

def test_my_wrong_step(whitebox):
    assert judge(whitebox, partial(step, wrong=2)).cause[0].kind == "scale"
"""
MARKED = """
import pytest
pytestmark = pytest.mark.ranks

@pytest.fixture
def world():
    return "mine"

@pytest.mark.one_rank
def test_my_fixture(world, request):
    assert world == "mine"
    assert request.config.getoption("--rank-timeout") == "mine"
    assert not any(mark.name.startswith("pipeproof") for mark in request.node.iter_markers())
"""
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--rank-timeout", default="mine")
"""
PROJECTS: Mapping[str, Mapping[str, str]] = {
    "a folder called pipeline": {
        "pipeline/__init__.py": "",
        "pipeline/step.py": STEP,
        "test_it.py": JUDGED.format(own="pipeline.step"),
    },
    "a module called validation": {"validation.py": STEP, "test_it.py": JUDGED.format(own="validation")},
    "a folder called reference": {
        "reference/__init__.py": "",
        "reference/model.py": STEP,
        "tests/conftest.py": "import reference.model",
        "tests/test_it.py": JUDGED.format(own="reference.model"),
    },
    "a fixture called world": {
        "conftest.py": CONFTEST,
        "pytest.ini": "[pytest]\naddopts = --strict-markers\nmarkers =\n    ranks: mine\n    one_rank: mine\n",
        "test_it.py": MARKED,
    },
    "all of them": {
        "pipeline/__init__.py": "from .step import *",
        "pipeline/step.py": STEP,
        "validation.py": "from reference import build, data, step",
        "reference.py": "from pipeline import build, data, step",
        "conftest.py": CONFTEST,
        "pytest.ini": "[pytest]\nmarkers =\n    ranks: mine\n    one_rank: mine\n",
        "test_it.py": JUDGED.format(own="validation"),
        "test_marks.py": MARKED,
    },
}
LAUNCHES: Mapping[str, tuple[str, ...]] = {
    "pytest": ("-m", "pytest", "-q"),
    "pytest -n 2": ("-m", "pytest", "-q", "-n", "2"),
    "torchrun": ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pytest", "-q"),
}


def written(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("project", "launch"),
    [*((name, "pytest") for name in PROJECTS), ("all of them", "pytest -n 2"), ("all of them", "torchrun")],
)
def test_a_project_with_names_like_ours_is_tested(
    installed: Installed, tmp_path: Path, project: str, launch: str
) -> None:
    done = installed.run(written(tmp_path, PROJECTS[project]), *LAUNCHES[launch])
    assert done.returncode == 0, done.stdout
    tests = sum(text.count("\ndef test_") for text in PROJECTS[project].values())
    assert f"\n{tests} passed" in done.stdout


def test_a_project_that_is_wrong_would_be_seen(installed: Installed, tmp_path: Path) -> None:
    files = PROJECTS["a module called validation"]
    wrong = {**files, "validation.py": files["validation.py"].replace("wrong=1", "wrong=3")}
    done = installed.run(written(tmp_path, wrong), *LAUNCHES["pytest"])
    assert done.returncode == 1, done.stdout
    assert "scale" in done.stdout


OWN: Mapping[str, tuple[tuple[str, ...], str]] = {
    "module": (("-m", "pipeproof", "show", "1f1b", "--ranks", "2", "--microbatches", "4"), ""),
    "root": (
        ("-c", "import pipeproof, sys; print({'torch', 'numpy'} & {*sys.modules}, pipeproof.__version__)"),
        "set()",
    ),
    "plugin": (("-c", "import pipeproof.pytest_plugin, sys; print({'torch', 'numpy'} & {*sys.modules})"), "set()"),
    "page": (
        ("-c", "from pipeproof import Verdict; print(Verdict('c', 'pass', 'none', ()).to_html())"),
        "<!doctype html>",
    ),
    "names": (("-c", "from pipeproof import PipelineSchedule, World, Case, check_step, record_step, whitebox"), ""),
}


@pytest.mark.parametrize("what", OWN)
def test_the_root_is_the_front_door(installed: Installed, tmp_path: Path, what: str) -> None:
    arguments, output = OWN[what]
    done = installed.run(tmp_path, *arguments)
    assert done.returncode == 0, done.stdout
    assert output in done.stdout


def test_every_module_is_in_the_wheel_and_nothing_else_is(installed: Installed) -> None:
    (site,) = installed.python.parents[1].glob("lib/python3*/site-packages")
    found = {str(path.relative_to(site)) for path in site.rglob("*.py")}
    ours = {f"pipeproof/{source.path}".replace("pipeproof/validation/", "pipeproof/") for source in OURS}
    assert found == ours
