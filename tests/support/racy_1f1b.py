"""1F1B by hand, with a race in it: what is right on most days, and on all of a machine that is quick enough.

Each function is what such a loop does in place of ``send`` or ``receive``, or with its losses when the step ends: one
of each kind. The catalogue of specimens has many more, planted in our own runtime.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.examples.my_pipeline import OneFOneB


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


def frees_what_it_sent(self: OneFOneB, tensor: Tensor, peer: int) -> None:
    """Puts a tensor of one element in place of what it sends."""
    out = tensor.clone()
    OneFOneB.send(self, out, peer)
    out.data = torch.empty(1)


def forgets_to_wait(self: OneFOneB, tensor: Tensor, peer: int) -> None:
    """Lets go of the work of its sends."""
    dist.isend(tensor, peer)


def waits_for_its_sends(self: OneFOneB, tensor: Tensor, peer: int) -> None:
    """Sends and waits, which is no race: it hangs wherever a send waits for its receive."""
    dist.send(tensor, peer)


def reads_early(self: OneFOneB, peer: int, like: Tensor) -> Tensor:
    """Waits for what it receives when the step ends."""
    buffer = torch.empty_like(like)
    self.sent.append((dist.irecv(buffer, peer), buffer))
    return buffer


def receives_twice(self: OneFOneB, peer: int, like: Tensor) -> Tensor:
    """Posts the next receive into the buffer of the last one, which has not come."""
    buffer = vars(self).setdefault("buffer", torch.empty_like(like))
    for _ in range(2):
        self.sent.append((dist.irecv(buffer, peer), buffer))
    self.sent[-1][0].wait()
    return buffer


def receives_into_one_buffer(self: OneFOneB, peer: int, like: Tensor) -> Tensor:
    """Has one buffer for all inputs, also for those that the backward still needs: wrong, and no race."""
    if peer > self.rank:
        return OneFOneB.receive(self, peer, like)
    buffer = vars(self).setdefault("buffer", torch.empty_like(like)).detach()
    dist.recv(buffer, peer)
    return buffer


def receives_doubles(self: OneFOneB, peer: int, like: Tensor) -> Tensor:
    """Receives numbers of another type."""
    buffer = torch.empty_like(like, dtype=torch.float64)
    dist.recv(buffer, peer)
    return buffer.float()


def reduces_alone(self: OneFOneB, losses: list[Tensor]) -> None:
    """Adds the losses up where there are any, which is on the last rank; the others go on to the barrier."""
    if losses:
        dist.all_reduce(torch.stack(losses))
    dist.barrier()


def sends_first(self: OneFOneB, losses: list[Tensor]) -> None:
    """Neighbours exchange a number: both send, and then receive."""
    for peer in (self.rank - 1, self.rank + 1):
        if 0 <= peer <= self.last:
            dist.send(torch.ones(1), peer)
            dist.recv(torch.ones(1), peer)


def with_method(name: str, method: Callable[..., Any]) -> type[OneFOneB]:
    """A loop that has ``method`` in place of its own of that name."""
    return type(method.__name__, (Ending,), {name: method})


CHANGES: Mapping[str, Mapping[Callable[..., Any], str]] = {  # by the method that is another one
    "send": {
        sends_one_buffer: "overwritten-in-flight",
        frees_what_it_sent: "freed-in-flight",
        forgets_to_wait: "never-waited",
    },
    "receive": {reads_early: "read-before-wait", receives_twice: "received-twice", receives_doubles: "mismatched"},
    "end": {reduces_alone: "desynchronised"},
}
RACES: dict[type[OneFOneB], str] = {
    with_method(name, one): kind for name, those in CHANGES.items() for one, kind in those.items()
}
ONE_BUFFER = with_method("receive", receives_into_one_buffer)
READS_EARLY, WAITS = with_method("receive", reads_early), with_method("send", waits_for_its_sends)
HANGS = with_method("end", sends_first)


def trained(model: Any, microbatches: list[Any], *, by: type[OneFOneB]) -> Any:
    """One step on a stage for each rank: a step for ``whitebox.validate``, with its stage watched."""
    from pipeproof import watch

    stage = watch(model[dist.get_rank()])
    return stage, by(stage, microbatches).step()
