"""On NCCL's rules a program goes on after ``wait()``: it ends with the right numbers, or waits where one does there."""

import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from pipeproof.pipeline.transports import Transport
from pipeproof.worlds.rank_report import Race, RankFailed
from pipeproof.worlds.simulated.exploration import told
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.sweeps import SWEEP

HANG, MAY_END = "a hang", "a hang, which may end"


def store() -> Any:
    return c10d._get_default_store()


def passes_on_and_tells(context: RankContext) -> float:
    """Rank 1 says that it has asked for a message once it has also computed with that, and passed it on."""
    buffer = torch.zeros(1)
    if context.rank == 0:
        store().wait(["go"])
        dist.send(torch.ones(1), 1)
    elif context.rank == 1:
        dist.recv(buffer, 0)
        buffer = buffer * 2 + 1
        dist.send(buffer, 2)
        buffer.mul_(10)
        store().set("go", "")
    else:
        dist.recv(buffer, 1)
    return float(buffer)


def batched(context: RankContext) -> float:
    """Both ends of a batch are used again at once."""
    if context.rank:
        store().wait(["go"])
    sent, came, peer = torch.ones(1), torch.zeros(1), 1 - context.rank
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, came, peer)]):
        work.wait()
    sent.add_(5)
    came.mul_(2)
    if not context.rank:
        store().set("go", "")
    return float(came)


def twice_in_place(context: RankContext) -> float:
    tensor = torch.full((1,), context.rank + 1.0)
    if context.rank:
        store().wait(["go"])
    dist.all_reduce(tensor)
    dist.all_reduce(tensor)
    if not context.rank:
        store().set("go", "")
    return float(tensor)


def receives_and_meets(context: RankContext, meets: Callable[[Any], None], backend: str, *, number: bool) -> float:
    """Rank 1 sends once rank 0 has come to it by another way; rank 0 does that after its receive."""
    group, buffer = dist.new_group(backend=backend), torch.zeros(1)
    if context.rank:
        meets(group)
        dist.send(torch.ones(1), 0, group=group if backend == "nccl" else None)
        return 1.0
    dist.recv(buffer, 1, group=group if backend == "nccl" else None)
    buffer += 1
    if number and float(buffer * 2) != 4:
        raise ValueError("a number is waited for")
    meets(group)
    return float(buffer)


def by_key(group: object) -> None:
    del group
    store().set("go", "") if dist.get_rank() == 0 else store().wait(["go"])


def by_barrier(group: Any) -> None:
    dist.barrier(group=group)


def by_sum(group: Any) -> None:
    dist.all_reduce(torch.ones(1), group=group)


meets_by = partial(partial, receives_and_meets, number=False)


def waits_with_a_bound(context: RankContext) -> float:
    if context.rank:
        store().wait(["go"])
        dist.send(torch.ones(1), 0)
        return 1.0
    work: Any = dist.irecv(buffer := torch.zeros(1), 1)
    work.wait(timedelta(seconds=5))
    store().set("go", "")
    return float(buffer)


def in_backward(context: RankContext) -> float:
    """What a hook waits for, and whether it then asks for a number, is not seen."""
    weight = torch.full((1,), 2.0, requires_grad=True)
    if context.rank:
        store().wait(["go"])
    output = weight * (context.rank + 1)
    output.register_hook(lambda grad: (dist.all_reduce(grad), grad)[1])
    output.backward()
    if not context.rank:
        store().set("go", "")
    assert weight.grad is not None
    return float(weight.grad)


def before_a_backward(context: RankContext) -> float:
    """So it is of a hook that reads what came before."""
    weight = torch.full((1,), 2.0, requires_grad=True)
    if context.rank:
        store().wait(["go"])
        dist.send(torch.ones(1), 0)
        return 1.0
    dist.recv(buffer := torch.zeros(1), 1)
    (output := weight * 1).register_hook(lambda grad: grad * float(buffer))
    torch.autograd.backward([output])
    store().set("go", "")
    return float(weight.grad or 0)


def never_the_same(context: RankContext) -> float:
    """What comes is another number in each run: nobody can have foreseen it."""
    if context.rank:
        store().wait(["go"])
        dist.send(torch.tensor([float(int.from_bytes(os.urandom(6)))]), 0)
        return 1.0
    dist.recv(buffer := torch.zeros(1), 1)
    store().set("go", "")
    return float(buffer)


def both_send_first(context: RankContext) -> None:
    dist.send(torch.ones(1), 1 - context.rank)
    dist.recv(torch.empty(1), 1 - context.rank)
    store().set(str(context.rank), "")
    store().wait([str(1 - context.rank)])


def in_rounds(context: RankContext) -> float:
    """What a device does once it can is nothing yet that anybody waits for."""
    buffer = torch.zeros(1)
    for number in range(3):
        if context.rank:
            store().wait([f"go {number}"])
            dist.send(torch.ones(1), 0)
        else:
            dist.recv(buffer, 1)
            store().set(f"go {number}", "")
    return float(buffer)


def carried_by_gloo(context: RankContext) -> None:
    """A host that is to send what a device has not received yet waits for that."""
    group, buffer = dist.new_group(backend="gloo"), torch.zeros(1)
    if context.rank == 0:
        dist.recv(buffer, 1)
    dist.broadcast(buffer, 0, group=group)
    if context.rank == 1:
        dist.send(buffer, 0)


def asks(context: RankContext, number: Callable[[Tensor], object]) -> float:
    if context.rank:
        store().wait(["go"])
        dist.send(torch.ones(1, dtype=torch.int64), 0)
        return 1.0
    dist.recv(buffer := torch.zeros(1, dtype=torch.int64), 1)
    number(buffer)
    store().set("go", "")
    return float(buffer)


def in_a_list(buffer: Tensor) -> object:
    return torch.tensor([buffer[0]])


def in_an_index(buffer: Tensor) -> object:
    return torch.ones(2)[buffer[0]]


def in_a_size(buffer: Tensor) -> object:
    return torch.ones(buffer[0])


def pickled(buffer: Tensor) -> object:
    return pickle.dumps(buffer)


def of_another(buffer: Tensor) -> object:
    """It may lie on the host, as the number of steps of an optimizer does."""
    return torch.ones(1).item()


def under_a_mask(buffer: Tensor) -> object:
    """A number is put there by the device itself."""
    buffer[buffer > 1] = 0
    return buffer


def repeated(buffer: Tensor) -> object:
    return buffer.repeat_interleave(2)


def one_is_on_host(context: RankContext) -> float:
    """What was copied to the host is there, whatever the device waits for now."""
    if context.rank:
        for key in ("go", "on"):
            store().wait([key])
            dist.send(torch.ones(1), 0)
        return 1.0
    dist.recv(one := torch.zeros(1), 1)
    store().set("go", "")
    on_host, like, put = one.cpu(), torch.empty_like(one, device="cpu").fill_(1), torch.zeros(1)
    put[0] = one[0]
    dist.recv(torch.zeros(1), 1)
    total = float(on_host) + float(like) + float(put)
    store().set("on", "")
    return total


def meet_in_a_barrier(context: RankContext) -> None:
    """A barrier is a device's, too, which comes to it after the message."""
    if context.rank == 0:
        dist.recv(torch.zeros(1), 1)
        torch.ones(1).item()
    dist.barrier()
    if context.rank:
        dist.send(torch.ones(1), 0)


def read_too_early(context: RankContext) -> None:
    if context.rank:
        store().wait(["go"])
        dist.send(torch.ones(1), 0)
        dist.send(torch.ones(1), 0)
        return
    one, other = torch.zeros(1), torch.zeros(1)
    works: list[Any] = [dist.irecv(one, 1), dist.irecv(other, 1)]
    works[0].wait()
    other.mul(2)
    store().set("go", "")
    works[1].wait()


def another_collective(context: RankContext) -> None:
    """Who goes on calls what its device comes to later."""
    tensor = torch.zeros(1)
    if context.rank:
        store().wait(["go"])
        dist.send(tensor, 0)
        dist.broadcast(tensor, 0)
        return
    dist.recv(tensor, 1)
    store().set("go", "")
    dist.all_reduce(tensor)


def raises(context: RankContext) -> None:
    receives_and_meets(context, by_key, "nccl", number=False)
    raise ValueError("after that")


def outcome(world: World, job: Callable[..., object], ranks: int) -> object:
    try:
        return world.run(job, ranks=ranks)
    except RankFailed as failure:
        if not failure.hang:
            return type(failure.cause)
    return MAY_END if world.may_end() else HANG


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (passes_on_and_tells, [0.0, 30.0, 3.0]),
        (batched, [2.0, 2.0]),
        (twice_in_place, [6.0, 6.0]),
        (meets_by(meets=by_barrier, backend="gloo"), [2.0, 1.0]),
        (meets_by(meets=by_barrier, backend="nccl"), HANG),
        (meets_by(meets=by_sum, backend="nccl"), HANG),
        (partial(receives_and_meets, meets=by_key, backend="nccl", number=True), HANG),
        (waits_with_a_bound, HANG),
        (both_send_first, HANG),
        (in_backward, MAY_END),
        (before_a_backward, MAY_END),
        (never_the_same, MAY_END),
        (raises, ValueError),
        (in_rounds, [1.0, 0.0]),
        (carried_by_gloo, HANG),
        (partial(asks, number=in_a_list), MAY_END),
        (partial(asks, number=pickled), MAY_END),
        (partial(asks, number=of_another), MAY_END),
        (partial(asks, number=under_a_mask), MAY_END),
        (partial(asks, number=repeated), [1.0, 1.0]),
        (one_is_on_host, MAY_END),
        (meet_in_a_barrier, HANG),
        (read_too_early, Race),
        (another_collective, Race),
        pytest.param(partial(asks, number=in_an_index), MAY_END, marks=SWEEP),
        pytest.param(partial(asks, number=in_a_size), MAY_END, marks=SWEEP),
        pytest.param(meets_by(meets=by_key, backend="nccl"), [2.0, 1.0], marks=SWEEP),
        pytest.param(meets_by(meets=by_sum, backend="gloo"), [2.0, 1.0], marks=SWEEP),
    ],
)
def test_what_becomes_of_a_program_that_another_rank_waits_for(
    job: Callable[..., object], expected: object, simulated: World
) -> None:
    simulated.transport, ranks = Transport.PAIR, len(expected) if isinstance(expected, list) else 2
    for simulated.seed in range(2):
        assert outcome(simulated, job, ranks) == expected


def test_where_no_device_waits_nobody_goes_on(simulated: World) -> None:
    simulated.transport = Transport.UNLIMITED
    assert outcome(simulated, passes_on_and_tells, 3) == HANG
    simulated.transport = Transport.RANK
    assert outcome(simulated, batched, 2) == [2.0, 2.0]
    assert outcome(simulated, asks_nccl_to_block, 2) == HANG


def asks_nccl_to_block(context: RankContext) -> float:
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    return receives_and_meets(context, by_key, "nccl", number=False)


def test_a_search_does_not_claim_to_be_all_where_programs_went_on(simulated: World) -> None:
    simulated.transport, simulated.most = Transport.PAIR, 20
    assert [simulated.run(batched, ranks=2) for _ in simulated.interleavings()] == [[2.0, 2.0]]
    assert not simulated.explorations[0].complete
    golden(told(simulated.explorations).partition("; ")[2])
