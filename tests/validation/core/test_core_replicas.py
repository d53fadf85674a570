"""Which rank works on which replica, and on which microbatches; what cannot be is refused."""

from typing import Any

import pytest

from pipeproof.core.replicas import Replicas, ReplicasError


def test_every_replica_has_its_own_microbatches() -> None:
    replicas = Replicas((0, 1, 0, 1), 6)
    replicas.check()
    assert [list(replicas.share(rank)) for rank in range(4)] == [[0, 2, 4], [1, 3, 5], [0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    ("of", "microbatches", "sentence"),
    [
        ((1, 1, 2, 2), 6, r"ranks is \[1, 1, 2, 2\]: expected the number of each rank's replica, from 0 on"),
        (("a", "b"), 6, r"ranks is \['a', 'b'\]: expected the number of each rank's replica"),
        ((0, 1, 0, 1), 1, "1 microbatch for 2 replicas: expected at least one for each"),
    ],
)
def test_replicas_that_cannot_be(of: tuple[int, ...], microbatches: int, sentence: str) -> None:
    with pytest.raises(ReplicasError, match=sentence):
        Replicas(of, microbatches).check()


def test_replicas_may_have_unequal_shares_unless_they_wait_for_each_other() -> None:
    uneven = Replicas.along({"pp": 2, "dp": 2}, 5)
    uneven.check()
    assert [list(uneven.share(rank)) for rank in (0, 1)] == [[0, 2, 4], [1, 3]]
    Replicas.along({"dp": 2, "ep": 1}, 5).check()
    for axis in ("ep", "fsdp", "dp_shard"):
        told = f"5 microbatches for 2 replicas: expected a multiple, because ranks along {axis} wait for each other"
        with pytest.raises(ReplicasError, match=told):
            Replicas.along({axis: 2}, 5).check()


def test_a_mesh_says_who_shares_data_stages_and_parameters() -> None:
    found = Replicas.along({"pp": 2, "dp": 2, "tp": 2}, 4)
    assert found.of == (0, 0, 1, 1, 0, 0, 1, 1)
    assert found.together == (0, 0, 0, 0, 1, 1, 1, 1)
    assert found.copies == found.of
    assert not found.sequence
    experts = Replicas.along({"dp": 2, "ep": 2, "cp": 2}, 4)
    assert experts.of == (0, 0, 1, 1, 2, 2, 3, 3), "ranks along ep have data of their own"
    assert experts.copies == (0, 0, 0, 0, 1, 1, 1, 1), "and need not have the same parameters"
    assert experts.sequence == "cp"
    assert Replicas.along(2, 4) == Replicas((0, 0), 4)
    assert Replicas.along([0, 1], 4) == Replicas((0, 1), 4)


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        ({"pp": 2, "zz": 2}, "ranks has an axis 'zz': expected some of pp, dp, "),
        ({"dp": 0}, "ranks has 0 along 'dp': expected how many ranks there are"),
        ({"tp": "2"}, "ranks has '2' along 'tp'"),
        ({}, "ranks is empty"),
        ({"dp": 1 << 10, "tp": 1 << 10}, "expected at least 1, and at most 4096"),
        (0, "ranks is 0: expected at least 1, and at most 4096"),
        (-1, "ranks is -1: expected at least 1"),
        (1 << 30, "expected at least 1, and at most 4096"),
        ([], "ranks is 0: expected at least 1"),
        (None, "ranks is None: expected how many, the replica of each as a list, or a mesh"),
        (True, "ranks is True: expected how many"),
        ("2", "ranks is '2': expected how many"),
    ],
)
def test_ranks_that_are_none_are_refused(ranks: Any, sentence: str) -> None:
    with pytest.raises(ReplicasError, match=sentence):
        Replicas.along(ranks, 4)
