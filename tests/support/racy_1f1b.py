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


RACES: dict[type[OneFOneB], str] = {
    SendsOneBuffer: "overwritten-in-flight",
    ReadsEarly: "read-before-wait",
    ForgetsToWait: "never-waited",
    ReceivesTwice: "received-twice",
    ReceivesDoubles: "mismatched",
    ReceivesLess: "mismatched",
    ReducesAlone: "desynchronised",
    ReducesOthers: "desynchronised",
}


def trained(model: Any, microbatches: list[Any], *, by: type[OneFOneB], loss_fn: Callable[..., Tensor]) -> Any:
    """One step on a stage for each rank: a step for ``whitebox.validate``, with its stage watched."""
    from pipeproof.foreign import watch

    stage = watch(model[dist.get_rank()])
    return stage, by(stage, microbatches, loss_fn).step()
