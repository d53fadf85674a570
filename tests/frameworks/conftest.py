"""Each file has ranks of its own: engines change torch when they are imported, and so disturb each other."""

from collections.abc import Iterator

import pytest

from pipeproof import World


@pytest.fixture(autouse=True, scope="module")
def own_ranks(pipeproof_world: World) -> Iterator[None]:
    yield
    pipeproof_world.close()
