"""Of many variants a few are tests of every change, and all others are marked for a sweep."""

import pytest

from tests.support.golden import COLLECTED


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(5))
def test_each_second_is_of_every_change(number: int, request: pytest.FixtureRequest) -> None:
    own = [one for one in request.config.stash[COLLECTED] if one.name.startswith(f"{request.node.originalname}[")]
    marked = [one.get_closest_marker("sweep") is not None for one in own]
    assert marked == [bool(k % 2) for k in range(len(own))]
    assert len(own) in (1, 5), "who names one variant has that alone"
