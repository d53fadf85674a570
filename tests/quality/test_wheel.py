"""What a user gets: a wheel, installed where nothing of this clone is, beside projects with folders named like ours."""

import os
import pty
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from pipeproof.worlds.launcher import launch_environment
from tests.support.guides import GUIDES
from tests.support.once import once
from tests.support.sources import OURS, PACKAGES, ROOT
from tests.support.sweeps import some
from tests.support.warm_start import Ended, WarmStart, run_new

pytestmark = pytest.mark.pipeproof_ranks  # it starts processes
_BOUND_S = 240


@dataclass(frozen=True)
class Installed:
    """A Python that has the wheel, and what we depend on; ``warm`` has imported torch, and nothing of ours."""

    python: Path
    wheel: Path
    warm: WarmStart

    def run(self, folder: Path, *arguments: str) -> Ended:
        """``python ARGUMENTS`` in ``folder``; all output as one text."""
        return run_new(self.python, folder, arguments, _environment(), bound_s=_BOUND_S)

    def run_warm(self, folder: Path, *arguments: str) -> Ended:
        """The same, faster."""
        return self.warm.run(folder, arguments, [_environment()], bound_s=_BOUND_S)


def _environment() -> dict[str, str]:
    return {name: text for name, text in launch_environment().items() if not name.startswith(("PYTEST_", "PYTHON"))}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """Build the wheel, and install it by name from a folder of wheels, as from an index: once for all workers."""

    def install() -> list[str]:
        return [*map(str, _installed(tmp_path_factory.mktemp("installed")))]

    python, wheel = map(Path, once(tmp_path_factory, "installed", install))
    warm = WarmStart(_environment(), python=python)
    yield Installed(python, wheel, warm)
    warm.close()


def _installed(folder: Path) -> tuple[Path, Path]:
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
    (wheel,) = (folder / "wheels").glob("*.whl")
    return python, wheel


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
    assert judge(whitebox, partial(step, wrong=2)).causes[0].kind == "scale"
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
        "test_my_schedules.py": (ROOT / "tests" / "examples" / "test_my_schedules.py").read_text(),
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


def number_of_tests(project: str) -> int:
    return sum(text.count("\ndef test_") for text in PROJECTS[project].values())


@pytest.mark.sweep
@pytest.mark.parametrize("project", some(PROJECTS, left=[name for name in PROJECTS if name != "all of them"]))
def test_a_project_with_names_like_ours_is_collected(installed: Installed, tmp_path: Path, project: str) -> None:
    """Its modules are its own, also while our plugin loads. What they do then, the project that has all names shows."""
    done = installed.run_warm(written(tmp_path, PROJECTS[project]), *LAUNCHES["pytest"], "--collect-only")
    assert done.returncode == 0, done.stdout
    assert f"\n{number_of_tests(project)} test" in done.stdout


@pytest.mark.sweep
@pytest.mark.parametrize("launch", some(LAUNCHES, left=["pytest", "torchrun"]))  # the first is part of pytest -n 2
def test_a_project_with_all_names_like_ours_is_tested(installed: Installed, tmp_path: Path, launch: str) -> None:
    start = installed.run if launch == "torchrun" else installed.run_warm
    done = start(written(tmp_path, PROJECTS["all of them"]), *LAUNCHES[launch])
    assert done.returncode == 0, done.stdout
    assert f"\n{number_of_tests('all of them')} passed" in done.stdout


@pytest.mark.sweep
def test_a_project_that_is_wrong_would_be_seen(installed: Installed, tmp_path: Path) -> None:
    files = PROJECTS["a module called validation"]
    wrong = {**files, "validation.py": files["validation.py"].replace("wrong=1", "wrong=3")}
    done = installed.run_warm(written(tmp_path, wrong), *LAUNCHES["pytest"])
    assert done.returncode == 1, done.stdout
    assert "a multiple of" in done.stdout


LOADED = "print({'torch', 'numpy'} & {*sys.modules}, pipeproof.__version__)"
OWN: Mapping[str, tuple[tuple[str, ...], str]] = {
    "module": (("-m", "pipeproof", "show", "1f1b", "--ranks", "2", "--microbatches", "4"), ""),
    "root and plugin": (("-c", f"import pipeproof, pipeproof.pytest_plugin, sys; {LOADED}"), "set()"),
    "page": (
        ("-c", "from pipeproof import Verdict; print(Verdict('c', 'pass', 'none', ()).to_html())"),
        "<!doctype html>",
    ),
    "names": (("-c", "from pipeproof import PipelineSchedule, World, Case, check_step, record_step, whitebox"), ""),
    "starters": (("-m", "pipeproof", "init", "torch"), "It runs as it is:  pytest test_my_pipeline.py"),
}


@pytest.mark.parametrize("what", OWN)
def test_the_root_is_the_front_door(installed: Installed, tmp_path: Path, what: str) -> None:
    arguments, output = OWN[what]
    done = installed.run(tmp_path, *arguments)
    assert done.returncode == 0, done.stdout
    assert output in done.stdout


LOOKED_INTO = """
from validation import build, data, step
import torch

def looked_into(model, microbatches):
    answer = 6 * 7
    breakpoint()
    return step(model, microbatches)

def test_it(whitebox):
    loss_fn = torch.nn.functional.mse_loss
    options = dict(reference=build, microbatches=data(), loss_fn=loss_fn, timeout_s=5.0)
    whitebox.validate(looked_into, ranks=1, **options).raise_if_failed()
"""


@pytest.mark.sweep
def test_a_breakpoint_in_a_step_reaches_the_terminal(installed: Installed, tmp_path: Path) -> None:
    written(tmp_path, {"validation.py": STEP, "test_it.py": LOOKED_INTO})
    pid, terminal = pty.fork()  # the child has a terminal of its own
    if not pid:
        os.chdir(tmp_path)
        os.execv(installed.python, [str(installed.python), "-m", "pytest", "-q", "test_it.py"])
    said, answers = "", [b"p f'it is {answer}'\n", b"c\n"]
    with suppress(OSError):  # the terminal ends with the child
        while piece := os.read(terminal, 4096):
            said += piece.decode()
            if said.endswith("(Pdb rank 0) "):
                os.write(terminal, answers.pop(0))
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, said
    assert "it is 42" in said
    assert answers == []


BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


@pytest.mark.sweep
def test_the_source_distribution_makes_the_same_wheel(installed: Installed, tmp_path: Path) -> None:
    if find_spec("setuptools") is None:  # importing it changes what Python imports
        pytest.skip("setuptools is not installed")
    clone = tmp_path / "clone"  # a copy, as building leaves files beside the sources
    for name in PACKAGES:
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    build(clone, "build_sdist", tmp_path)
    (made,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    build(unpacked, "build_wheel", tmp_path)
    (again,) = tmp_path.glob("*.whl")
    assert contents(again) == contents(installed.wheel)
    assert any(name == "pipeproof/reports/schema.json" for name, _ in contents(again))


def build(folder: Path, what: str, out: Path) -> None:
    """Call a hook of the build in ``folder``, as pip does."""
    done = run_new(sys.executable, folder, ["-c", BUILD, what, str(out)], os.environ, bound_s=_BOUND_S)
    assert done.returncode == 0, done.stdout


def contents(wheel: Path) -> set[tuple[str, int]]:
    """The files in a wheel, each with its checksum, but for what says who made it and how."""
    made = ("/RECORD", "/WHEEL", "/METADATA")
    with ZipFile(wheel) as file:
        return {(one.filename, one.CRC) for one in file.infolist() if not one.filename.endswith(made)}


def test_every_module_is_in_the_wheel_and_nothing_else_is(installed: Installed) -> None:
    (site,) = installed.python.parents[1].glob("lib/python3*/site-packages")
    found = {str(path.relative_to(site)) for path in site.rglob("*.py")}
    ours = {f"pipeproof/{source.path}".replace("pipeproof/validation/", "pipeproof/") for source in OURS}
    assert found == ours
    guides = {path.name for path in (site / "pipeproof" / "guides").iterdir()}
    assert guides == {path.name for path in GUIDES.iterdir()} >= {"quickstart.md"}
