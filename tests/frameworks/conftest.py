"""Each file has ranks of its own: engines change torch when they are imported, and so disturb each other."""

from collections.abc import Iterator

import pytest

from pipeproof import World
from tests.frameworks import shared
from tests.frameworks.shared import own as own


@pytest.fixture(autouse=True, scope="module")
def own_ranks(pipeproof_world: World) -> Iterator[None]:
    yield
    pipeproof_world.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A shared test has the cases of the file that takes it."""
    if metafunc.function.__module__ == shared.__name__:
        (name,) = set(metafunc.fixturenames) & shared.PARAMETERS
        found = shared.cases(metafunc.module, name)
        metafunc.parametrize(name, found.values(), ids=list(found))
