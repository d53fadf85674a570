"""pytest's side of a world: the fixture, and options for every test that uses ranks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from validation.world import World


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that concern ranks."""
    group = parser.getgroup("pipeproof", "ranks and their devices")
    group.addoption("--pipeproof-device", choices=("cpu", "cuda"), default="cpu", help="where ranks compute")
    group.addoption("--rank-timeout", type=float, default=300.0, metavar="SECONDS", help="bound for one rank's phase")


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "one_rank: under torchrun, run on rank 0 only; the other ranks take its verdict")


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator["World"]:
    """Ranks to run jobs on, kept for the whole session."""
    from validation.world import World  # torch comes with it, so only where a test wants ranks

    with World(device=request.config.getoption("--pipeproof-device")) as world:
        yield world
