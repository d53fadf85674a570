"""What numbers tell of ranks that have a stage in common; where they fit nothing, nothing is said."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeproof.diagnosis.members import Members, Replicas, ReplicasError
from pipeproof.foreign.matching import Local
from pipeproof.foreign.rank import Part, RankMade
from pipeproof.foreign.shared_stages import joined_parts
from pipeproof.foreign.stages_in_order import Stage
from pipeproof.observers.shards import Shard
from pipeproof.reference.step import Contribution
from tests.support.golden import golden

REPLICAS = Replicas((0, 1), 4)
UPPER, LOWER = Shard(((0, 2),)), Shard(((2, 4),))
EACH = [torch.randn(4, generator=torch.Generator().manual_seed(m)) for m in range(4)]
WHOLE = sum(EACH[1:], EACH[0])


def part(gradient: Tensor, shard: Shard | None = None) -> RankMade:
    one = Part((Local("w", "w"),), (gradient,), shards={} if shard is None else {0: shard})
    return RankMade((one,), (), None, None, None, {})


def notes(*ranks: RankMade, norms: tuple[float | None, float | None] = (None, None)) -> dict[str, str]:
    (merged,) = joined_parts(ranks, REPLICAS)[0].parts
    contributions = [Contribution(0.0, {(0, "w"): gradient}) for gradient in EACH]
    return Members([Stage(0, 0, merged, {0: "w"}, {})], REPLICAS, contributions, norms).notes()


def test_nothing_is_said_of_what_is_right_or_fits_nothing() -> None:
    assert notes(part(WHOLE), part(WHOLE)) == {}
    assert notes(part(WHOLE.flip(0)), part(WHOLE.flip(0)), norms=(1.0, None)) == {}
    assert notes(part(WHOLE[:2], UPPER), part(WHOLE[2:], LOWER), norms=(WHOLE.norm().item(), None)) == {}


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_replica_that_kept_its_own(factor: float) -> None:
    found = notes(part(factor * (EACH[0] + EACH[2])), part(WHOLE))
    assert found.keys() == {"replicas"}
    golden(found["replicas"])


@pytest.mark.parametrize(
    ("factor", "note"),
    [
        (0.5, "all are 1/2 of what is expected, as a mean over 2 replicas in place of a sum gives"),
        (
            2.0,
            "all are 2 times what is expected, as a sum over 2 replicas in place of a mean, or a loss not divided by "
            "the 2 microbatches of a replica, gives",
        ),
    ],
)
def test_a_mean_and_a_sum_exchanged(factor: float, note: str) -> None:
    assert notes(part(factor * WHOLE), part(factor * WHOLE)) == {"gradient": note}


def test_shards_exchanged() -> None:
    found = notes(part(WHOLE[:2], LOWER), part(WHOLE[2:], UPPER))
    assert found.keys() == {"gradient"}
    golden(found["gradient"])


def test_a_norm_of_own_shards() -> None:
    found = notes(part(WHOLE[:2], UPPER), part(WHOLE[2:], LOWER), norms=(None, WHOLE[2:].norm().item()))
    assert found.keys() == {"grad-norm"}
    golden(found["grad-norm"])


def test_a_norm_that_is_near_that_of_own_shards_by_chance() -> None:
    assert not notes(part(WHOLE[:2], UPPER), part(WHOLE[2:], LOWER), norms=(None, 1.00015 * WHOLE[2:].norm().item()))


def test_a_norm_that_counts_copies_or_leaves_out_what_few_hold() -> None:
    twice = WHOLE.norm().item() * 2**0.5
    told = {"grad-norm": "parameters that several ranks hold are counted once for each rank"}
    assert notes(part(WHOLE), part(WHOLE), norms=(twice, twice)) == told
    assert notes(part(WHOLE), part(WHOLE), norms=(twice, 1.001 * twice)) == {}, "ranks do not agree"
    assert notes(part(WHOLE), part(WHOLE), norms=(WHOLE.norm().item(), None)) == {}


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
