"""What several test modules share."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from validation.worlds.launcher import launch_environment

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

_BOUND_S = 240.0
settings.register_profile("untimed", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("untimed")
_STARTS_PROCESSES = {"torchrun", "python", "processes"}  # fixtures

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small here: a second thread only waits, and takes a core
sys.dont_write_bytecode = False  # or each process compiles the project anew, and pytest rewrites all its asserts
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_finish() -> None:
    """What lies there now stays: spare every later collection of garbage the walk over it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes like what uses ranks: ``-m "not ranks"`` is the fast part.

    What does not share the ranks of a world has nothing to gain from running once on every rank of torchrun.
    """
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if _STARTS_PROCESSES & fixtures:
            item.add_marker("ranks")
        if "world" not in fixtures:
            item.add_marker("one_rank")


@pytest.fixture(autouse=True)
def no_rank_of_torchrun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that runs on one rank only must not wait for the others, so it is not told that there are others."""
    if request.node.get_closest_marker("one_rank"):
        for name in os.environ.keys() - launch_environment().keys():
            monkeypatch.delenv(name)


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as a rank of torchrun that is not the first, as far as its environment says."""
    for name, text in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, text)


@pytest.fixture(scope="session")
def torchrun() -> Launch:
    """Run ``torchrun --nproc-per-node ranks ARGUMENTS`` in a folder; its status and all output as one text."""

    def launch(folder: Path, *arguments: str, ranks: int) -> "subprocess.CompletedProcess[str]":
        return _run(folder, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *arguments)

    return launch


@pytest.fixture(scope="session")
def python() -> Launch:
    """Run ``python ARGUMENTS`` in a folder, with further variables; its status and all output as one text."""
    return _run


def _run(folder: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: text for name, text in launch_environment().items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_BOUND_S,
        check=False,
    )
