"""Which microbatches each rank is given."""

import pytest

from validation.observers.share import Replicas, ReplicasError


def test_every_replica_has_its_own_microbatches() -> None:
    replicas = Replicas((0, 1, 0, 1), 6)
    replicas.check()
    assert [list(replicas.share(rank)) for rank in range(4)] == [[0, 2, 4], [1, 3, 5], [0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    ("of", "microbatches", "sentence"),
    [
        ((1, 1, 2, 2), 6, r"ranks is \[1, 1, 2, 2\]: expected the number of each rank's replica, from 0 on"),
        (("a", "b"), 6, r"ranks is \['a', 'b'\]: expected the number of each rank's replica"),
        ((0, 1, 0, 1), 5, "5 microbatches for 2 replicas: expected a multiple"),
    ],
)
def test_replicas_that_cannot_be(of: tuple[int, ...], microbatches: int, sentence: str) -> None:
    with pytest.raises(ReplicasError, match=sentence):
        Replicas(of, microbatches).check()
