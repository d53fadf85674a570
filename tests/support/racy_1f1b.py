"""1F1B by hand, with a race in it: what is right on most days, and on all of a machine that is quick enough.

Each function is what such a loop does in place of ``send`` or ``receive``, or with its losses when the step ends.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.examples.hand_written_1f1b import OneFOneB


class Ending(OneFOneB):
    """A loop that does something when its step is over."""

    def step(self) -> list[Tensor]:
        losses = super().step()
        self.end(losses)
        return losses

    def end(self, losses: list[Tensor]) -> None:
        """Nothing."""


def sends_one_buffer(self: OneFOneB, tensor: Tensor, peer: int) -> None:
    """Copies what it sends into one buffer, and does not wait before it does so again."""
    out = vars(self).setdefault("out", torch.empty_like(tensor))
    OneFOneB.send(self, out.copy_(tensor), peer)


def divides_what_it_sent(self: OneFOneB, tensor: Tensor, peer: int) -> None:
    """Divides in place behind its isend."""
    out = tensor.clone()
    OneFOneB.send(self, out, peer)
    out.div_(2)


def clears_its_bucket(self: OneFOneB, tensor: Tensor, peer: int) -> None:
    """Sends rows of one tensor, which it clears for the next."""
    bucket = torch.stack([tensor, tensor])
    OneFOneB.send(self, bucket[1], peer)
    bucket.zero_()


def frees_what_it_sent(self: OneFOneB, tensor: Tensor, peer: int) -> None:
    """Puts a tensor of one element in place of what it sends."""
    out = tensor.clone()
    OneFOneB.send(self, out, peer)
    out.data = torch.empty(1)


def forgets_to_wait(self: OneFOneB, tensor: Tensor, peer: int) -> None:
    """Lets go of the work of its sends."""
    dist.isend(tensor, peer)


def keeps_one_handle(self: OneFOneB, tensor: Tensor, peer: int) -> None:
    """Keeps the work of its last send."""
    OneFOneB.send(self, tensor, peer)
    del self.sending[:-1]


def waits_for_its_sends(self: OneFOneB, tensor: Tensor, peer: int) -> None:
    """Sends and waits, which is no race: it hangs wherever a send waits for its receive."""
    dist.send(tensor, peer)


def reads_early(self: OneFOneB, peer: int) -> Tensor:
    """Waits for what it receives when the step ends."""
    buffer = torch.empty_like(self.buffer)
    self.sending.append((dist.irecv(buffer, peer), buffer))
    return buffer


def asks_once(self: OneFOneB, peer: int) -> Tensor:
    """Asks once whether a message has come."""
    buffer = torch.empty_like(self.buffer)
    work: Any = dist.irecv(buffer, peer)
    if not work.is_completed():
        self.sending.append((work, buffer))
    return buffer


def clears_what_it_receives(self: OneFOneB, peer: int) -> Tensor:
    """Clears a buffer once its receive is posted."""
    buffer = torch.empty_like(self.buffer)
    work: Any = dist.irecv(buffer, peer)
    buffer.zero_()
    work.wait()
    return buffer


def gives_back_what_it_receives(self: OneFOneB, peer: int) -> Tensor:
    """Frees a buffer that a receive is posted into."""
    buffer = torch.empty_like(self.buffer)
    work: Any = dist.irecv(buffer, peer)
    buffer.untyped_storage().resize_(0)
    work.wait()
    return buffer


def receives_twice(self: OneFOneB, peer: int) -> Tensor:
    """Posts the next receive into the buffer of the last one, which has not come."""
    for _ in range(2):
        self.sending.append((dist.irecv(self.buffer, peer), self.buffer))
    self.sending[-1][0].wait()
    return self.buffer


def receives_doubles(self: OneFOneB, peer: int) -> Tensor:
    """Receives numbers of another type."""
    buffer = torch.empty_like(self.buffer, dtype=torch.float64)
    dist.recv(buffer, peer)
    return buffer.float()


def receives_less(self: OneFOneB, peer: int) -> Tensor:
    """Receives one row less than is sent."""
    buffer = torch.zeros_like(self.buffer)
    dist.recv(buffer[1:], peer)
    return buffer


class WaitsForTheLast(OneFOneB):
    """Receives a message in two halves, and waits for the second."""

    def send(self, tensor: Tensor, peer: int) -> None:
        for half in tensor.chunk(2):
            super().send(half.contiguous(), peer)

    def receive(self, peer: int) -> Tensor:
        buffer = torch.empty_like(self.buffer)
        works: list[Any] = [dist.irecv(half, peer) for half in buffer.chunk(2)]
        works[-1].wait()
        return buffer


class AddsWhileItReduces(OneFOneB):
    """Reduces gradients behind the first backward, and waits when the step ends."""

    reduced = False

    def backward(self) -> None:
        super().backward()
        for parameter in () if self.reduced else self.stage.parameters():
            assert parameter.grad is not None
            copy = parameter.grad.clone()
            self.sending.append((dist.all_reduce(parameter.grad, async_op=True), copy))
        self.reduced = True


def reduces_alone(self: OneFOneB, losses: list[Tensor]) -> None:
    """Adds the losses up where there are any, which is on the last rank; the others go on to the barrier."""
    if losses:
        dist.all_reduce(torch.stack(losses))
    dist.barrier()


def reduces_others(self: OneFOneB, losses: list[Tensor]) -> None:
    """Adds up as many losses as a rank has."""
    dist.all_reduce(torch.zeros(len(losses) + 1))


def reduces_in_its_order(self: OneFOneB, losses: list[Tensor]) -> None:
    """Reduces a sum and a maximum, the last rank the maximum first."""
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[:: -1 if losses else 1]:
        dist.all_reduce(torch.ones(1), op=operation)


def broadcasts_from_itself(self: OneFOneB, losses: list[Tensor]) -> None:
    """Every rank is the root."""
    dist.broadcast(torch.ones(1), self.rank)


def reduces_what_has_not_come(self: OneFOneB, losses: list[Tensor]) -> None:
    """Adds up what it is still receiving."""
    total = torch.ones(1)
    work: Any = dist.irecv(total, 0) if self.rank else None
    for peer in range(1, self.last + 1) if self.rank == 0 else ():
        dist.send(total, peer)
    dist.all_reduce(total)
    if work is not None:
        work.wait()


def lets_a_reduction_go(self: OneFOneB, losses: list[Tensor]) -> None:
    """Waits for a sum where it is printed."""
    work: Any = dist.all_reduce(torch.ones(1), async_op=True)
    if self.rank == 0:
        work.wait()


def reads_a_sum_early(self: OneFOneB, losses: list[Tensor]) -> None:
    """Reads a sum before it waits for it."""
    total = torch.ones(1)
    work: Any = dist.all_reduce(total, async_op=True)
    assert total.item() > 0
    work.wait()


def sends_first(self: OneFOneB, losses: list[Tensor]) -> None:
    """Neighbours exchange a number: both send, and then receive."""
    for peer in (self.rank - 1, self.rank + 1):
        if 0 <= peer <= self.last:
            dist.send(torch.ones(1), peer)
            dist.recv(torch.ones(1), peer)


def some_come_to_a_barrier(self: OneFOneB, losses: list[Tensor]) -> None:
    """The last rank has nothing to write, and does not wait."""
    if not losses:
        dist.barrier()


def reduces_in_another_group(self: OneFOneB, losses: list[Tensor]) -> None:
    """The last rank takes the default group."""
    pipeline = dist.new_group([*range(self.last + 1)])
    dist.all_reduce(torch.ones(1), group=None if losses else pipeline)


def receives_behind_a_barrier(self: OneFOneB, losses: list[Tensor]) -> None:
    """The last rank posts a receive once all have come to a barrier, and another waits for its send before that."""
    if self.rank == 0:
        dist.send(torch.ones(1), self.last)
    dist.barrier()
    if losses:
        dist.recv(torch.ones(1), 0)


def with_method(name: str, method: Callable[..., Any]) -> type[OneFOneB]:
    """A loop that has ``method`` in place of its own of that name."""
    made: type[OneFOneB] = type(method.__name__, (Ending,), {name: method})
    return made


CHANGES: Mapping[str, Mapping[Callable[..., Any], str]] = {  # by the method that is another one
    "send": {
        sends_one_buffer: "overwritten-in-flight",
        divides_what_it_sent: "overwritten-in-flight",
        clears_its_bucket: "overwritten-in-flight",
        frees_what_it_sent: "freed-in-flight",
        forgets_to_wait: "never-waited",
        keeps_one_handle: "never-waited",
    },
    "receive": {
        clears_what_it_receives: "overwritten-in-flight",
        gives_back_what_it_receives: "freed-in-flight",
        reads_early: "read-before-wait",
        asks_once: "read-before-wait",
        receives_twice: "received-twice",
        receives_doubles: "mismatched",
        receives_less: "mismatched",
    },
    "end": {
        reduces_what_has_not_come: "read-before-wait",
        reads_a_sum_early: "read-before-wait",
        lets_a_reduction_go: "never-waited",
        reduces_alone: "desynchronised",
        reduces_others: "desynchronised",
        reduces_in_its_order: "desynchronised",
        broadcasts_from_itself: "desynchronised",
    },
}
RACES: dict[type[OneFOneB], str] = {
    WaitsForTheLast: "read-before-wait",
    AddsWhileItReduces: "overwritten-in-flight",
    **{with_method(name, one): kind for name, those in CHANGES.items() for one, kind in those.items()},
}
ENDLESS = (sends_first, some_come_to_a_barrier, reduces_in_another_group, receives_behind_a_barrier)
HANGS = tuple(with_method("end", one) for one in ENDLESS)
READS_EARLY, WAITS = with_method("receive", reads_early), with_method("send", waits_for_its_sends)


def trained(model: Any, microbatches: list[Any], *, by: type[OneFOneB], loss_fn: Callable[..., Tensor]) -> Any:
    """One step on a stage for each rank: a step for ``whitebox.validate``, with its stage watched."""
    from pipeproof import watch

    stage = watch(model[dist.get_rank()])
    return stage, by(stage, microbatches, loss_fn).step()
