"""A second set of connections between a gloo group's ranks: each carries data one way only.

A gloo connection has one lock. A sender holds it through the system call, and gloo's own thread, notified meanwhile
that something has arrived on the same connection, asks for the lock again and again without sleeping (``handleEvents``
in gloo's ``transport/tcp/pair.cc``). If the sender has just lost its processor to that very thread, a whole time slice
goes by. With data both ways on one connection this costs more than the messages themselves: steps of small messages
take up to twice as long as on two.
"""

import weakref
from datetime import timedelta
from typing import Protocol, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from pipeproof.pipeline.waiting import DEFAULT_TIMEOUT_S, waiting


class Lane(Protocol):
    """A transport's need from a group: point-to-point messages."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> dist.Work: ...


# Shared by all transports of a group: connecting costs some milliseconds, and two threads. torch.distributed keeps a
# group until destroy_process_group, and with the group its second lane goes.
_second: "weakref.WeakKeyDictionary[dist.ProcessGroup, Lane]" = weakref.WeakKeyDictionary()


def second_lane(group: dist.ProcessGroup) -> Lane | None:
    """Another gloo group with the same ranks; None for other backends and for a single rank.

    Every rank of ``group`` must call it; the first call connects them.
    """
    if dist.get_backend(group) != "gloo" or group.size() == 1:
        return None
    lane = _second.get(group)
    if lane is None:
        store = PrefixStore("pipeproof/second lane", group.get_group_store())
        with waiting("the other ranks of the process group, to connect a second time"):
            gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), timedelta(seconds=DEFAULT_TIMEOUT_S))
        lane = cast(Lane, gloo)  # torch's stubs leave its methods out
        _second[group] = lane
    return lane
