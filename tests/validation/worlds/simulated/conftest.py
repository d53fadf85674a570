"""One world for all tests of simulated ranks: its seed and its transport are set as a test wants them."""

from collections.abc import Iterator

import pytest

from pipeproof.pipeline.transports import Transport
from pipeproof.worlds.world import World


@pytest.fixture(scope="session")
def kept_simulated() -> Iterator[World]:
    with World(kind="simulated", timeout_s=30.0, silent=True) as world:
        yield world


@pytest.fixture
def simulated(kept_simulated: World) -> World:
    kept_simulated.seed, kept_simulated.transport = 0, Transport.UNLIMITED
    return kept_simulated
