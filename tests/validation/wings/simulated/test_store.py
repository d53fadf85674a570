"""The store of a simulated run: calls come back when there is something, and never hold up another rank."""

import time

import pytest
import torch.distributed as dist

from pipeproof.wings.simulated import SimulatedWorld
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext


def meets(context: RankContext) -> tuple[str, bool, int, str]:
    store = dist.PrefixStore("mine", context.group.get_group_store())
    if context.rank == 2:
        store.set("key", "value")
    found = store.get("key").decode()
    store.wait(["key"])
    number = store.add("count", 2)
    dist.barrier()
    total = store.add("count", 0)
    first = store.compare_set("once", "", str(context.rank)).decode()
    dist.barrier()
    assert store.get("once").decode() == first
    assert number in range(2, total + 1, 2)
    return found, store.check(["key", "nothing"]), total, first


def test_what_one_rank_puts_there_others_get(simulated: SimulatedWorld) -> None:
    firsts = set()
    for simulated.seed in range(6):
        rows = simulated.run(meets, ranks=3)
        assert {row[:3] for row in rows} == {("value", False, 6)}
        (first,) = {row[3] for row in rows}
        firsts.add(first)
    assert len(firsts) > 1, "who comes first is left to the seed"


def deletes(context: RankContext) -> tuple[bool, bool, bool]:
    store = dist.PrefixStore("mine", context.group.get_group_store())
    store.set("key", "value")
    return store.delete_key("key"), store.delete_key("key"), store.num_keys() > 0


def test_what_is_deleted_is_gone(simulated: SimulatedWorld) -> None:
    assert simulated.run(deletes, ranks=1) == [(True, False, True)]


def waits(context: RankContext) -> None:
    context.group.get_group_store().get("never")


def test_what_never_comes_is_told(simulated: SimulatedWorld) -> None:
    with pytest.raises(RankFailed, match=r"can never go on at test_store.py:\d+, waiting for the store's key \S*never"):
        simulated.run(waits, ranks=2)


def goes_round(context: RankContext, reads: str) -> int:
    """Reads until all have counted, or until it has the lock."""
    store = dist.distributed_c10d._get_default_store()
    if reads == "lock":
        while store.compare_set("lock", "", str(context.rank)) != str(context.rank).encode():
            time.sleep(0.1)
        store.delete_key("lock")
        return context.ranks
    total = store.add("count", 1)
    while total < context.ranks:
        total = int(store.get("count")) if reads == "get" else store.add("count", 0)
    return total


@pytest.mark.parametrize("reads", ["get", "add", "lock"])
def test_who_reads_again_and_again_does_not_keep_others_from_their_turn(reads: str, simulated: SimulatedWorld) -> None:
    for simulated.most, simulated.seeds in ((20, ()), (None, range(6))):
        for _ in simulated.interleavings():
            assert simulated.run(goes_round, reads, ranks=2) == [2, 2]
