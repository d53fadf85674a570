"""1F1B by hand, with a race in it: what is right on most days, and on all of a machine that is quick enough."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.examples.hand_written_1f1b import OneFOneB


class SendsOneBuffer(OneFOneB):
    """Copies what it sends into one buffer, and does not wait before it does so again."""

    def send(self, tensor: Tensor, peer: int) -> None:
        self.out = getattr(self, "out", torch.empty_like(tensor))
        super().send(self.out.copy_(tensor), peer)


class ReadsEarly(OneFOneB):
    """Waits for what it receives when the step ends."""

    def receive(self, peer: int) -> Tensor:
        buffer = torch.empty_like(self.buffer)
        self.sending.append((dist.irecv(buffer, peer), buffer))
        return buffer


class ForgetsToWait(OneFOneB):
    """Lets go of the work of its sends."""

    def send(self, tensor: Tensor, peer: int) -> None:
        dist.isend(tensor, peer)


class ReceivesTwice(OneFOneB):
    """Posts the next receive into the buffer of the last one, which has not come."""

    def receive(self, peer: int) -> Tensor:
        for _ in range(2):
            self.sending.append((dist.irecv(self.buffer, peer), self.buffer))
        self.sending[-1][0].wait()
        return self.buffer


class ReceivesDoubles(OneFOneB):
    """Receives numbers of another type."""

    def receive(self, peer: int) -> Tensor:
        buffer = torch.empty_like(self.buffer, dtype=torch.float64)
        dist.recv(buffer, peer)
        return buffer.float()


class ReceivesLess(OneFOneB):
    """Receives one row less than is sent."""

    def receive(self, peer: int) -> Tensor:
        buffer = torch.zeros_like(self.buffer)
        dist.recv(buffer[1:], peer)
        return buffer


class ReducesAlone(OneFOneB):
    """Adds the losses up where there are any, which is on the last rank; the others go on to the barrier."""

    def step(self) -> list[Tensor]:
        losses = super().step()
        if losses:
            dist.all_reduce(torch.stack(losses))
        dist.barrier()
        return losses


class ReducesOthers(OneFOneB):
    """Adds up as many losses as a rank has."""

    def step(self) -> list[Tensor]:
        losses = super().step()
        dist.all_reduce(torch.zeros(len(losses) + 1))
        return losses


class WaitsForItsSends(OneFOneB):
    """Sends and waits, which is no race: it hangs wherever a send waits for its receive."""

    def send(self, tensor: Tensor, peer: int) -> None:
        dist.send(tensor, peer)


class DividesWhatItSent(OneFOneB):
    """Divides in place behind its isend."""

    def send(self, tensor: Tensor, peer: int) -> None:
        out = tensor.clone()
        super().send(out, peer)
        out.div_(2)


class FreesWhatItSent(OneFOneB):
    """Puts a tensor of one element in place of what it sends."""

    def send(self, tensor: Tensor, peer: int) -> None:
        out = tensor.clone()
        super().send(out, peer)
        out.data = torch.empty(1)


class ClearsItsBucket(OneFOneB):
    """Sends rows of one tensor, which it clears for the next."""

    def send(self, tensor: Tensor, peer: int) -> None:
        bucket = torch.stack([tensor, tensor])
        super().send(bucket[1], peer)
        bucket.zero_()


class OneHandle(OneFOneB):
    """Keeps the work of its last send."""

    def send(self, tensor: Tensor, peer: int) -> None:
        super().send(tensor, peer)
        del self.sending[:-1]


class AsksOnce(OneFOneB):
    """Asks once whether a message has come."""

    def receive(self, peer: int) -> Tensor:
        buffer = torch.empty_like(self.buffer)
        work: Any = dist.irecv(buffer, peer)
        if not work.is_completed():
            self.sending.append((work, buffer))
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


class ClearsWhatItReceives(OneFOneB):
    """Clears a buffer once its receive is posted."""

    def receive(self, peer: int) -> Tensor:
        buffer = torch.empty_like(self.buffer)
        work: Any = dist.irecv(buffer, peer)
        buffer.zero_()
        work.wait()
        return buffer


class GivesBackWhatItReceives(OneFOneB):
    """Frees a buffer that a receive is posted into."""

    def receive(self, peer: int) -> Tensor:
        buffer = torch.empty_like(self.buffer)
        work: Any = dist.irecv(buffer, peer)
        buffer.untyped_storage().resize_(0)
        work.wait()
        return buffer


class ReducesInItsOrder(OneFOneB):
    """Reduces a sum and a maximum, the last rank the maximum first."""

    def step(self) -> list[Tensor]:
        losses = super().step()
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[:: -1 if losses else 1]:
            dist.all_reduce(torch.ones(1), op=operation)
        return losses


class BroadcastsFromItself(OneFOneB):
    """Every rank is the root."""

    def step(self) -> list[Tensor]:
        losses = super().step()
        dist.broadcast(torch.ones(1), self.rank)
        return losses


class ReducesWhatHasNotCome(OneFOneB):
    """Adds up what it is still receiving."""

    def step(self) -> list[Tensor]:
        losses, total = super().step(), torch.ones(1)
        work: Any = dist.irecv(total, 0) if self.rank else None
        for peer in range(1, self.last + 1) if self.rank == 0 else ():
            dist.send(total, peer)
        dist.all_reduce(total)
        if work is not None:
            work.wait()
        return losses


class LetsAReductionGo(OneFOneB):
    """Waits for a sum where it is printed."""

    def step(self) -> list[Tensor]:
        losses = super().step()
        work: Any = dist.all_reduce(torch.ones(1), async_op=True)
        if self.rank == 0:
            work.wait()
        return losses


class ReadsASumEarly(OneFOneB):
    """Reads a sum before it waits for it."""

    def step(self) -> list[Tensor]:
        losses, total = super().step(), torch.ones(1)
        work: Any = dist.all_reduce(total, async_op=True)
        assert total.item() > 0
        work.wait()
        return losses


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


class SendsFirst(OneFOneB):
    """Neighbours exchange a number: both send, and then receive."""

    def step(self) -> list[Tensor]:
        losses = super().step()
        for peer in (self.rank - 1, self.rank + 1):
            if 0 <= peer <= self.last:
                dist.send(torch.ones(1), peer)
                dist.recv(torch.ones(1), peer)
        return losses


class SomeComeToABarrier(OneFOneB):
    """The last rank has nothing to write, and does not wait."""

    def step(self) -> list[Tensor]:
        losses = super().step()
        if not losses:
            dist.barrier()
        return losses


class ReducesInAnotherGroup(OneFOneB):
    """The last rank takes the default group."""

    def step(self) -> list[Tensor]:
        losses = super().step()
        pipeline = dist.new_group([*range(self.last + 1)])
        dist.all_reduce(torch.ones(1), group=None if losses else pipeline)
        return losses


class ReceivesBehindABarrier(OneFOneB):
    """The last rank posts a receive once all have come to a barrier, and another waits for its send before that."""

    def step(self) -> list[Tensor]:
        losses = super().step()
        if self.rank == 0:
            dist.send(torch.ones(1), self.last)
        dist.barrier()
        if losses:
            dist.recv(torch.ones(1), 0)
        return losses


RACES: dict[type[OneFOneB], str] = {
    SendsOneBuffer: "overwritten-in-flight",
    DividesWhatItSent: "overwritten-in-flight",
    ClearsItsBucket: "overwritten-in-flight",
    ClearsWhatItReceives: "overwritten-in-flight",
    AddsWhileItReduces: "overwritten-in-flight",
    FreesWhatItSent: "freed-in-flight",
    GivesBackWhatItReceives: "freed-in-flight",
    ReadsEarly: "read-before-wait",
    AsksOnce: "read-before-wait",
    WaitsForTheLast: "read-before-wait",
    ReducesWhatHasNotCome: "read-before-wait",
    ReadsASumEarly: "read-before-wait",
    ForgetsToWait: "never-waited",
    OneHandle: "never-waited",
    LetsAReductionGo: "never-waited",
    ReceivesTwice: "received-twice",
    ReceivesDoubles: "mismatched",
    ReceivesLess: "mismatched",
    ReducesAlone: "desynchronised",
    ReducesOthers: "desynchronised",
    ReducesInItsOrder: "desynchronised",
    BroadcastsFromItself: "desynchronised",
}
HANGS: tuple[type[OneFOneB], ...] = (SendsFirst, SomeComeToABarrier, ReducesInAnotherGroup, ReceivesBehindABarrier)


def trained(model: Any, microbatches: list[Any], *, by: type[OneFOneB], loss_fn: Callable[..., Tensor]) -> Any:
    """One step on a stage for each rank: a step for ``whitebox.validate``, with its stage watched."""
    from pipeproof import watch

    stage = watch(model[dist.get_rank()])
    return stage, by(stage, microbatches, loss_fn).step()
