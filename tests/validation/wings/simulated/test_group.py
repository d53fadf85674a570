"""Everything that torch.distributed calls on a simulated group gives what it gives on real ranks."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.pipeline.transports import Transport
from pipeproof.wings.simulated import SimulatedWorld
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.sweeps import SWEEP
from tests.support.works import finish, race_of


def every_collective(context: RankContext) -> dict[str, Any]:
    rank, ranks, observed = context.rank, context.ranks, dict[str, Any]()
    own = torch.arange(6.0).reshape(2, 3) + 10 * rank
    several = [own + 100 * k for k in range(ranks)]
    parts = [torch.empty(2, 3) for _ in range(ranks)]
    share, whole, turned, listed = torch.empty(2, 3), torch.empty(2 * ranks, 3), torch.empty(ranks), [f"from {rank}"]
    objects: list[Any] = [None] * ranks

    def note(outputs: list[Any], call: Callable[..., object], *given: Any, **named: Any) -> None:
        call(*given, **named)
        shown = [one.tolist() if isinstance(one, Tensor) else one for one in outputs]
        observed[f"{len(observed)} {call.__name__}"] = str(shown)

    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        note([changed := own.clone()], dist.all_reduce, changed, operation)
    note([changed := own.clone()], dist.broadcast, changed, 1)
    changed = own.clone()
    note([changed] if rank == 1 else [], dist.reduce, changed, 1)
    note(parts, dist.all_gather, parts, own)
    note([whole], dist.all_gather_into_tensor, whole, own)
    note(parts if rank == 0 else [], dist.gather, own, parts if rank == 0 else None)
    note([share], dist.scatter, share, several if rank == 0 else None)
    note([share], dist.reduce_scatter, share, several)
    note([share], dist.reduce_scatter_tensor, share, whole)
    note(parts, dist.all_to_all, parts, several)
    note([turned], dist.all_to_all_single, turned, torch.arange(float(ranks)) + 10 * rank)
    note(objects, dist.all_gather_object, objects, {"rank": rank})
    note(listed, dist.broadcast_object_list, listed, 0)
    pair = dist.new_group([0, 1])
    if rank < 2:
        note([own], dist.all_reduce, own, group=pair)
    dist.barrier()
    numbers = dist.get_rank(), dist.get_world_size(), dist.get_process_group_ranks(pair)
    return {**observed, "names": (str(dist.get_backend()), *numbers)}


def every_message(context: RankContext) -> list[Any]:
    rank, after, before = context.rank, (context.rank + 1) % context.ranks, (context.rank - 1) % context.ranks
    own, observed = torch.full((3,), float(rank)), []
    here, there = torch.empty(3), torch.empty(3)
    operations = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, here, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    sent = dist.isend(own + 10, after, tag=7)
    came = dist.irecv(there, before, tag=7)
    finish(came, sent)
    if rank == 0:
        dist.send(own, after)
    elif rank == 1:
        observed.append(dist.recv(torch.empty(3)))  # from any
    objects: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([{"x": 1}], after)
    elif rank == 1:
        dist.recv_object_list(objects, 0)
    return [here.tolist(), there.tolist(), observed, objects]


def polls(context: RankContext) -> list[float]:
    buffer = torch.empty(2)
    work = dist.irecv(buffer, 1 - context.rank)
    sent = dist.isend(torch.full((2,), float(context.rank)), 1 - context.rank)
    assert work is not None, "its rank is in the group"
    while not work.is_completed():
        pass
    finish(sent)
    return buffer.tolist()


def test_who_asks_whether_it_has_come_may_read(simulated: SimulatedWorld) -> None:
    assert simulated.run(polls, ranks=2) == [[1.0, 1.0], [0.0, 0.0]]


def built_on_groups(context: RankContext) -> tuple[bool, float, bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (context.ranks,))
    whole = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)]).sum().full_tensor()

    def gradient(wrap: Any) -> Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        wrapped = wrap(model)
        wrapped(torch.full((2, 4), float(context.rank))).sum().backward()
        found = model.weight.grad
        assert found is not None, "a backward has run"
        return found.full_tensor() if hasattr(found, "full_tensor") else found

    mean = torch.full((4, 4), 2.0 * sum(range(context.ranks)) / context.ranks)
    replicated = torch.equal(gradient(DistributedDataParallel), mean)
    return replicated, float(whole), torch.equal(gradient(lambda model: fully_shard(model, mesh=mesh)), mean)


@pytest.mark.long
def test_what_torch_builds_on_groups_runs_unchanged(simulated: SimulatedWorld) -> None:
    for simulated.transport in (Transport.UNLIMITED, Transport.PAIR):
        assert simulated.run(built_on_groups, ranks=2) == [(True, 28.0, True)] * 2


def of_other_shapes(context: RankContext) -> list[float]:
    number = torch.ones(() if context.rank == 0 else (1, 1))
    dist.all_reduce(number)
    row = torch.arange(3.0).reshape((1, 3) if context.rank == 0 else (3, 1))
    dist.all_reduce(row)
    rows = torch.full((2, 3) if context.rank == 0 else (6,), float(context.rank))
    dist.broadcast(rows, 1)
    return [number.item(), *row.flatten().tolist(), *rows.flatten().tolist()]


def uneven_shards(context: RankContext) -> list[Any]:
    """What DTensor remembers of a mesh is a rank's own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, context.ranks // 2))
    observed = []
    for length in (3, 5):  # of which some ranks have less than others, or nothing
        rows = distribute_tensor(torch.arange(3.0 * length).reshape(length, 3), mesh, [Shard(0), Shard(0)])
        columns = rows.redistribute(mesh, [Shard(0), Shard(1)])
        whole = columns.redistribute(mesh, [Shard(0), Replicate()])
        observed += [one.to_local().tolist() for one in (rows, columns, whole)]
    return observed


@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        (every_collective, 2),
        (every_message, 2),
        pytest.param(of_other_shapes, 2, marks=SWEEP),
        pytest.param(uneven_shards, 4, marks=[SWEEP, pytest.mark.long]),
    ],
)
def test_calls_give_what_they_give_on_real_ranks(job: Any, ranks: int, simulated: SimulatedWorld, world: World) -> None:
    real = world.run(job, ranks=ranks)
    for simulated.seed in range(3):
        assert simulated.run(job, ranks=ranks) == real


def divided(context: RankContext) -> None:
    dist.new_group([0, 1], backend="gloo")
    dist.monitored_barrier()


def premultiplied(context: RankContext) -> None:
    dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(2.0))


def names_another(context: RankContext) -> None:
    dist.broadcast(torch.ones(1), 2, group=dist.new_group([0, 1]))


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (divided, r"the simulated world has no ProcessGroup.monitored_barrier: run this on real ranks"),
        (premultiplied, r"the simulated world has no reduction PREMUL_SUM: run this on real ranks"),
        (names_another, "Global rank 2 is not part of group <SimulatedGloo 1>"),  # so it is called in every run
    ],
)
def test_what_is_not_there_says_so(job: Callable[..., None], said: str, simulated: SimulatedWorld) -> None:
    for _ in range(2):
        with pytest.raises(RankFailed, match=said):
            simulated.run(job, ranks=2)


def made_in_another_order(context: RankContext, use: str) -> None:
    """Two groups of which each rank is in one: those of odd ranks make the other one first."""
    pairs = [[0, 1], [2, 3]]
    made = {pair[0]: dist.new_group(pair) for pair in (reversed(pairs) if context.rank % 2 else pairs)}
    own = made[0 if context.rank < 2 else 2]
    if use == "sums":
        dist.all_reduce(torch.ones(1), group=own)
    elif dist.get_rank(own):
        dist.recv(torch.ones(1), group=own, group_src=0)
    else:
        dist.send(torch.ones(1), group=own, group_dst=1)


@pytest.mark.parametrize("use", ["sums", "messages"])
def test_groups_that_are_made_in_another_order_are_told(use: str, simulated: SimulatedWorld) -> None:
    for seed in range(4):
        cause = race_of(simulated, made_in_another_order, use, ranks=4, seeds=[seed])
        assert cause.kind == "desynchronised"
        golden(re.sub(r"\d", "#", cause.said))
        assert ["new_group(pair)" in line.text for _, line in cause.lines] == [True, True]
